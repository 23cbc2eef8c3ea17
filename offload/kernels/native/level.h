/* One instruction set level of the kernel. kernel.c defines LEVEL, LANES, DOTS, HAS_MAX, HAS_TILES and TARGET. */
#include "tile.h"

#if HAS_TILES
#include "amx.h"
#endif

#include "attend.h"

#include "share.h"

#if HAS_TILES
#include "quantized_amx.h"

#include "linear_amx.h"

static const struct level NAME(level) = {EXPAND_STRING(LEVEL), NAME(attend), NAME(merge),
                                              NAME(linear), norm_avx512, gate_avx512, round_avx512};
#else
#include "quantized.h"

#include "round.h"

#include "rows.h"

static const struct level NAME(level) = {EXPAND_STRING(LEVEL), NAME(attend), NAME(merge),
                                              NAME(linear), NAME(norm), NAME(gate), NAME(round)};
#endif

#undef vec
#undef ints
#undef vec_at
#undef ints_at
#undef VECTORS
#undef MAX_TILE
#undef BOTH_CHAINS
#undef HIGH_BITS
#undef HIGH_SHIFT
#undef HIGH_EACH
#undef ROLLED
#undef LEVEL
#undef LANES
#undef DOTS
#undef HAS_MAX
#undef HAS_TILES
#undef TARGET
