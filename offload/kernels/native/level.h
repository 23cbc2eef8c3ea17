/* One level of the kernel: the tile and what is built on it. LEVEL, LANES, DOTS and TARGET are defined by kernel.c. */
#include "tile.h"

#include "attend.h"

#include "share.h"

#include "rows.h"

static const struct level NAME(level) = {EXPAND_STRING(LEVEL), NAME(attend), NAME(merge),
                                              NAME(linear), NAME(norm), NAME(gate)};

#undef vec
#undef ints
#undef vec_at
#undef ints_at
#undef VECTORS
#undef MAX_TILE
#undef BOTH_CHAINS
#undef LEVEL
#undef LANES
#undef DOTS
#undef HAS_MAX
#undef TARGET
