/* One instruction set level of the kernel. kernel.c defines LEVEL, LANES, DOTS, HAS_MAX, HAS_TILES and TARGET. */
#include "tile.h"

#if HAS_TILES
#include "amx.h"
#endif

#include "quantized.h"

#if LANES == 4
#include "quantized_neon.h"
#endif

#include "quantized_kv.h"

#if HAS_MAX /* not emulated: that would only take longer to compile */
#include "quantize_kv.h"
#define QUANTIZE_GROUPS NAME(quantize_groups)
#else
#define QUANTIZE_GROUPS quantize_groups
#endif

#if BYTES
#include "quantized_bytes.h"
#endif

#include "attend.h"

#if HAS_TILES
#pragma push_macro("TARGET")
#undef TARGET
#define TARGET __attribute__((target(AMX)))
#include "attend_amx.h"
#pragma pop_macro("TARGET")
#endif

#include "share.h"

#include "observe.h"

#include "score_keys.h"

#include "round.h"

#include "rows.h"

#include "delta.h"

#include "softmax.h"

static const struct level NAME(level) = {EXPAND_STRING(LEVEL), NAME(attend), NAME(attend_all), NAME(merge),
                                              NAME(linear), NAME(norm), NAME(gate), NAME(round),
                                              NAME(observe), NAME(score_keys), NAME(delta), QUANTIZE_GROUPS,
                                              NAME(largest), NAME(exponentials), NAME(collect)};

#if HAS_TILES /* a level more: it differs in attention and linears of bf16 */
#pragma push_macro("TARGET")
#undef TARGET
#define TARGET __attribute__((target(AMX)))
#include "quantized_amx.h"

#include "quantized_row_amx.h"

#include "linear_amx.h"
#pragma pop_macro("TARGET")

static const struct level level_amx = {"amx",      attend_amx, attend_amx_all, NAME(merge), linear_amx,
                                       NAME(norm), NAME(gate), NAME(round),    observe_amx,
                                       NAME(score_keys), NAME(delta), QUANTIZE_GROUPS,
                                       NAME(largest), NAME(exponentials), NAME(collect)};
#endif

#undef vec
#undef ints
#undef uints
#undef vec_at
#undef ints_at
#undef VECTORS
#undef BYTES
#undef QUANTIZE_GROUPS
#undef MAX_TILE
#undef BOTH_CHAINS
#undef MAX_BLOCKS
#undef FEW_ROWS
#undef HIGH_BITS
#undef HIGH_SHIFT
#undef HIGH_EACH
#undef ROLLED
#undef EACH_WIDTH
#undef LEVEL
#undef LANES
#undef DOTS
#undef HAS_MAX
#undef HAS_TILES
#undef TARGET
