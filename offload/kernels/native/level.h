/* One instruction set level of the kernel. kernel.c defines LEVEL, LANES, DOTS, HAS_MAX and TARGET. */
#include "tile.h"

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

#include "share.h"

#include "observe.h"

#include "score_keys.h"

#include "round.h"

#include "rows.h"

#include "delta.h"

static const struct level NAME(level) = {EXPAND_STRING(LEVEL), NAME(attend), NAME(merge),
                                              NAME(linear), NAME(norm), NAME(gate), NAME(round),
                                              NAME(observe), NAME(score_keys), NAME(delta), QUANTIZE_GROUPS};

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
#undef TARGET
