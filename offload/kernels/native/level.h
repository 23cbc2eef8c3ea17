/* One instruction set level of the kernel. kernel.c defines LEVEL, LANES, DOTS, HAS_MAX and TARGET. */
#include "tile.h"

#include "byte_products.h"

#include "quantized.h"

#include "float8.h"

#include "quantized_kv.h"

#include "quantize_kv.h"

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

static const struct level NAME(level) = {
    EXPAND_STRING(LEVEL),
    {
        [ATTEND] = NAME(attend), [MERGE] = NAME(merge), [OBSERVE] = NAME(observe), [SCORE_KEYS] = NAME(score_keys),
        [LINEAR] = NAME(linear), [NORM] = NAME(norm), [ROUND] = NAME(round), [DELTA] = NAME(delta),
        [QUANTIZE] = NAME(quantize), [PACK_RUNS] = NAME(pack_or_unpack_runs), [APPEND] = append, [PACK] = pack, [UNPACK] = unpack,
    },
};

#undef vec
#undef ints
#undef uints
#undef vec_at
#undef ints_at
#undef VECTORS
#undef BYTES
#undef MAX_TILE
#undef BOTH_CHAINS
#undef MAX_BLOCKS
#undef FEW_ROWS
#undef BYTE_DOTS
#undef UNSIGNED_CODES
#undef ROLLED
#undef SUM_NOW
#undef BITS_OF
#undef IS_WIDE
#undef LEVEL
#undef LANES
#undef DOTS
#undef HAS_MAX
#undef TARGET
