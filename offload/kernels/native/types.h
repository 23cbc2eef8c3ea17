/* The kernel's argument structs and memory layout, which offload/kernels/native/structs.py mirrors. */
#ifndef TRIFORCE_TYPES_H
#define TRIFORCE_TYPES_H

#include <stdint.h>

/*
 * Keys and values are stored in blocks of 16 tokens; a block holds the keys, then the values, of one KV head:
 *
 *     bf16   keys [head_dim / 2][16][2]   values [8][head_dim][2]    pairs of dimensions, pairs of tokens
 *     fp32   keys [head_dim][16]          values [16][head_dim]
 *
 * A pair fills one 32-bit lane: the dot-product instruction for bf16 takes the pair, other machines split it with a
 * shift and a mask. Weights are stored in panels of 16 outputs, in the layout of the keys.
 */
enum {
    LAYOUT = 28,     /* raise it with any change that Python sees */
    BLOCK = 16,      /* tokens of a block, outputs of a panel */
    SPAN = 32,       /* tokens whose scores are weighed together, and of a group of quantised ones */
    LONG_SPAN = 64,      /* tokens of plain ones that are read together: several spans, a divisor of PIECE */
    OBSERVED_KEYS = 128, /* keys whose received attention one thread sums at once */
    SCORED_AHEAD = 4096, /* bytes of keys that are prefetched before they are scored */
    PIECE = 512,     /* tokens of a partial result; several cores can compute the pieces of one head */
    ROW_GROUP = 60,  /* query rows that read a span together: a multiple of the rows a tile of every level */
    MAX_HEAD_DIM = 576, /* of DeepSeek-V3's latents */
    GROUP_INPUTS = 32,  /* of quantised weights: inputs whose codes lie together */
    SMALL_LEVEL = 15,   /* levels between it and its negative are summed faster */
    NESTED_GROUPS = 8,  /* groups of a block whose scales share an outer factor */
    RUN = 128,          /* tokens of a KV head that are packed together */
    RUN_SPANS = RUN / SPAN,
    PATCHES = 30,       /* most values of a run that are stored apart */
    PACKED = 12,        /* in place of the bits of a code: keys and values are packed without loss */
    PLANE = 13,         /* the same, of runs that end with plane A: B is elsewhere */
    FLOAT8 = 9,         /* in place of the bits of a code: it is an e4m3 number (arXiv 2209.05433) without infinities */
    MOST_PARTIALS = 1 << 26, /* bytes of partial results up to which the keys are split in prefill */
};

/* What can be run, each with the struct of that name or the one in brackets; structs.py has them in this order. */
enum operation {
    ATTEND,     /* attention */
    MERGE,
    OBSERVE,    /* observation */
    SCORE_KEYS, /* key_scores */
    LINEAR,
    NORM,       /* and the gate of an MLP */
    ROUND,      /* rounding */
    DELTA,
    QUANTIZE,
    PACK_RUNS,  /* packing */
    APPEND,
    PACK,
    UNPACK,
    PASS,
    OPERATIONS
};

struct format;

/* Attention of `tokens` queries over stored keys and values; a row is a query of one head. */
struct attention {
    const void *q;        /* [tokens][kv_heads * group][head_dim], in the type of the KV, rotated */
    const char *kv;       /* the first head's first block */
    const int32_t *table; /* block numbers [kv_heads][table_stride] in the order of reading; NULL: 0, 1, 2, ... */
    void *out;            /* [tokens][kv_heads * group][head_dim], fp32, or bf16 where narrow_out is set */
    float *lse;           /* [tokens][kv_heads * group], log of the summed exponentials; may be NULL */
    int64_t head_stride;  /* bytes between the blocks of consecutive heads */
    int64_t table_stride; /* entries between the tables of consecutive heads */
    int64_t seen;         /* keys that the first token sees, counted along the table; at least 1 */
    int32_t causal;       /* 1: each further token sees one more key */
    int32_t tokens, kv_heads, group, head_dim;
    int32_t wide;         /* 1: fp32 KV and queries, 0: bf16 */
    int32_t narrow_out;
    float scale;
    /*
     * NULL, or the output in place of out and lse: the partial result of each PIECE of keys, for the caller to merge:
     * [pieces][tokens][kv_heads * group][2 + head_dim], for each row a maximum, the sum, the output. Scores may
     * exceed it by up to SLACK; sum and output refer to it.
     */
    float *partials;
    /*
     * NULL, or a tree of `nodes` tokens, whose last ones are the call's `tokens`: for each the index of its parent, smaller
     * than its own, or -1 if it follows the keys before the tree. Their keys are stored in the order of the tree. A token
     * sees those before the tree, its ancestors' and its own, in this order, as if they were a chain; `seen` is what a
     * token without parent sees. `causal` must be set.
     */
    const int32_t *parents;
    const int32_t *depths; /* NULL; the kernel's own: of the call's tokens */
    int32_t nodes;
    /*
     * NULL, or the first head's first quantised group of keys and values. A table must be given: its entry ~b, below
     * zero, is block b of them. Both blocks of a group follow each other, at a multiple of SPAN of the order of reading,
     * and all rows see them. Where they are packed instead of quantised, blocks may be anywhere, and be seen in part.
     */
    const char *quantized;
    int64_t quantized_stride; /* bytes between the groups of consecutive heads */
    const struct format *kv_format;
    /*
     * 0, or how many keys a token sees at most: the last ones of those that it would see. Then nothing is quantised, and
     * keys and values before them may be any finite numbers.
     */
    int64_t window;
};

/* The keys that a row sees: those before `end`, without those before `start`. */
struct view {
    int64_t start, end;
};

/* The attention that keys receive: the softmax weights of all rows of attention that has been computed, added up. */
struct observation {
    struct attention attention; /* `lse` is read, values and `out` are not; neither partials nor parents */
    float *received; /* [kv_heads][stride], to which the sums over a KV head's rows are added, by place in the order of reading */
    int64_t stride;  /* at least the keys that the last token sees */
};

/* For each head, the products of one query and `count` keys. */
struct key_scores {
    const void *query;   /* [heads][head_dim], in the type of the keys */
    const char *keys;    /* [heads] panels of 16 keys, in the layout of a block's keys */
    float *scores;       /* [heads][stride] */
    int64_t head_stride; /* bytes between the panels of consecutive heads */
    int64_t stride, count;
    int32_t heads, head_dim, wide;
};

/* Merge `pieces` partial results over consecutive keys, in order, into the result over the keys before them. */
struct merge {
    float *into;           /* [rows][2 + head_dim]; initially maximum -INFINITY, sum 0 and output 0 */
    const float *partials; /* [pieces][rows][2 + head_dim] */
    void *out;             /* NULL, or [rows][head_dim], fp32 or bf16: attention over everything merged */
    float *lse;            /* NULL, or [rows], with `out`: log of the summed exponentials */
    int64_t rows, pieces;
    int32_t head_dim;
    int32_t narrow_out;
};

/* New tokens: rotate the queries, rotate and store the keys, store the values. */
struct append {
    const void *q, *k, *v;   /* [tokens][heads or kv_heads][head_dim], heads contiguous */
    const void *cos, *sin;   /* [tokens][head_dim] */
    void *rotated;            /* [tokens][heads][head_dim], the rotated queries */
    char *kv;                /* the first head's first block */
    const int32_t *table;    /* the block number of each block of the sequence; NULL: 0, 1, 2, ... */
    int64_t q_stride, k_stride, v_stride; /* elements between consecutive tokens */
    int64_t head_stride;     /* bytes */
    int64_t start;           /* the first token's position */
    int32_t tokens;
    int32_t stored;          /* how many of them are stored already */
    int32_t heads, kv_heads, head_dim;
    int32_t wide;
};

/*
 * Quantised weights are stored in panels of 16 outputs too. A weight is scale * level + minimum, where the level of a
 * code is a whole number of 8 bits, or an e4m3 number. Four inputs of an output lie together. A group of 32 inputs is
 *
 *     codes   4 bits  [4][16][4] bytes: inputs 8 i + k in the low halves, 8 i + 4 + k in the high ones
 *             5 bits  4 bits each, and then [16][4] bytes: bit i is the fifth of input 4 i + k
 *             6 bits  4 bits each, and then [2][16][4] bytes: bits 2 i and 2 i + 1 are those of input 4 i + k of a half
 *             8 bits  [8][16][4] bytes: the codes are the levels, signed, or e4m3 numbers in the order 0, 2, 1, 3
 *     scales  [16] fp16; nested: [16] of 8 bits, signed. 6 bits: two of them, for 16 inputs each
 *     minima  the same, if the format has minima; one for all 32 inputs
 *
 * Where scales are nested, eight groups are a block. It begins with an fp16 factor of the scales and, if there are
 * minima, one of the minima, [16] each.
 *
 * Where they are wide, a block is the groups that share a scale. It begins with the scales and, if there are minima,
 * the minima, [16] fp32 each, and the groups are their codes alone.
 */
struct format {
    int32_t bits; /* 4, 5, 6, 8 or FLOAT8; of keys and values PACKED and PLANE too, and nothing else is read then */
    int32_t nested, has_minimum;
    int32_t wide;        /* 0, or the groups that share an fp32 scale and minimum: 1, 2 or 4 */
    int32_t base;        /* at most 0: levels are code + base; 1: they are not evenly spaced */
    uint16_t levels[64]; /* bf16, for less than 8 bits; with 4 bits repeated */
};

/*
 * Quantised keys and values (KIVI, arXiv 2402.02750) are stored in groups of SPAN tokens of one KV head. A number is
 * scale * level + middle; keys have a scale and a middle for each dimension, values for each token. A group is
 *
 *     bf16  key scales [head_dim], key middles [head_dim], value scales [SPAN], value middles [SPAN]
 *     key codes    [2][head_dim / 4] lines: of a block's 16 tokens, 4 dimensions
 *     value codes  [head_dim / 16][8] lines: of 16 dimensions, the tokens 2i, 16 + 2i, 2i + 1 and 17 + 2i
 *
 * A line is [16][4] codes, signed integers of a byte, as instructions multiply four bytes a lane.
 */
struct quantize {
    char *kv;               /* blocks: the first head's first block */
    char *quantized;        /* groups: the first head's first group */
    const int32_t *groups;  /* [count][3]: KV head, block number of the first of two blocks, group number */
    void *keys, *values;    /* NULL to quantise, or [count][SPAN][head_dim]: what the groups are dequantised to */
    int64_t head_stride, quantized_stride, count;
    int32_t head_dim, wide; /* of blocks and of `keys` and `values` */
    const struct format *format;
};

/*
 * Keys and values in bf16 are packed without loss in runs of RUN tokens of one KV head. 16 exponents, from an even one on,
 * are those of most values of a channel: an exponent becomes a code of 4 bits. The few other values, infinities and NaN
 * are patches. A run that would have more than PATCHES of them is not packed. Heads have a multiple of 32 dimensions.
 * A run is, padded with zeros to a multiple of 64 before plane A,
 *
 *     bases    [head_dim] bytes of keys, and of values [head_dim / 32][64] as the bytes of their lines: half the exponent
 *     patches  [RUN_SPANS][2] bytes: where the patches of a span's keys, and values, end; and [PATCHES] patches: the index
 *              among the elements of the span's two blocks of keys, or values, and the bf16; two bytes each
 *     plane A  [RUN_SPANS] spans: key lines [head_dim / 2][64], value lines [head_dim / 32][16][64]
 *     plane B  the same lines of half the bytes: of two lines, the first has the low digits
 *
 * A byte of plane A is the sign, the code's lowest bit, the 3 high bits of the mantissa, and the code's 3 high bits. Those
 * of plane B are the 4 low bits of the mantissa. A line has a row of 32 bf16 of each of two columns: those are the two
 * blocks, for keys, or 16 dimensions each, for values, which have a line for each pair of tokens. Within a column the
 * words are those 0 to 7, 16 to 23, 8 to 15, and 24 to 31: interleaved with others in lanes of 16 bytes, they are in order.
 */
struct packing {
    char *kv;            /* the first head's first block, bf16 */
    char *packed;        /* the first head's first run */
    const int32_t *runs; /* [count][2 + RUN / BLOCK]: KV head, number of the run, numbers of its blocks */
    uint8_t *fits;       /* [count], set to 1 for runs that have been packed; NULL: runs are unpacked to the blocks */
    int64_t head_stride, packed_stride, count; /* bytes between heads */
    int32_t head_dim;
    int32_t plane;       /* 1: unpack what plane A alone has, with half a step added */
};

/* Store a matrix in panels: the blocks of a GGUF file, or codes alone. */
struct pack {
    const uint8_t *codes; /* [rows][groups][32], or where `halves` is set [16]: code i and 16 + i in byte i */
    int64_t row_stride, group_stride; /* bytes between them */
    int64_t row_bytes;    /* 0, or the bytes of a row of blocks, to which `codes` points */
    int32_t halves;
    const struct format *format;
    char *weight;
    int64_t rows, inputs;
};

/* Round a matrix to one of four formats: Q4_1, Q5_1, Q6_K, Q8_0 by their bits. It fails for weights that are not finite. */
struct rounding {
    const void *weight; /* bf16, or fp32 where `wide` is set */
    uint8_t *codes;     /* one for each weight; 8 bits: signed */
    void *scales;       /* fp16 for each group of 32 weights; 6 bits: 8 bits for each 16 */
    uint16_t *minima;   /* fp16 for each group with 4 and 5 bits; 6 bits: the factor of each block of 256 */
    int64_t groups;     /* of 32 weights; 6 bits: blocks of 256 */
    int32_t bits, wide;
    int32_t fits;       /* 1: scales are those of the range; more: also by least squares, and the best are taken */
};

/* Rows of quantised weights, dequantised. */
struct unpack {
    const char *weight;
    const struct format *format;
    const int64_t *ids; /* [rows], numbers of outputs */
    void *y;            /* [rows][inputs], bf16, or fp32 where `wide` is set */
    int64_t rows, inputs;
    int32_t wide;
};

/* y = x W^T (+ bias) (+ onto); the weights in panels of 16 outputs, the last one padded with zeros. */
struct linear {
    const void *x;      /* [rows][inputs], in the type of the weights */
    const char *weight; /* [panels][inputs / 2][16][2] bf16 or [panels][inputs][16] fp32 */
    const float *bias;  /* [outputs] or NULL */
    const void *onto;   /* [rows][outputs], the residual to add, or NULL; may be y itself */
    void *y;            /* [rows][outputs] in the type of the weights, or fp32 where wide_out is set */
    const struct format *format; /* NULL, or how `weight` is quantised; then x is bf16 */
    int64_t rows, inputs, outputs;
    int64_t stride;     /* elements between rows of y and of onto; at least `outputs` */
    int32_t wide;
    int32_t wide_out;
};

/* Linears whose outputs lie side by side: x, onto, y, rows, stride and wide_out of each are those of the call. */
struct linears {
    const struct linear *parts;
    int64_t outputs; /* of all parts */
    int32_t count;
};

/*
 * RMSNorm of rows [width] with a weight; without a weight silu(gate) * up of rows [gate, up] of 2 * width. The norm's x
 * may be some heads of each token: then `heads` rows lie together, and there are `stride` elements between tokens.
 */
struct norm {
    const void *x, *weight;
    void *y;
    int64_t rows, width; /* width: a multiple of 16 */
    int64_t heads, stride;
    float epsilon;
    int32_t wide;
};

/* A layer of a Llama. The norms' x, y and rows are those of the call; without norms of q and k their width is 0. */
struct layer {
    struct norm input_norm, q_norm, k_norm, mlp_norm;
    struct linears qkv, o, gate_up, down;
};

/* A sequence of a pass: rows `first` to `first + tokens - 1`. Other fields are those of struct append and attention. */
struct sequence {
    char *kv;                /* of the first layer */
    const int32_t *places;   /* the table of struct append */
    const int32_t *table;    /* that of struct attention, in the first layer */
    const void *cos, *sin;
    const int32_t *parents;
    void *rotated;           /* [layers][queries][heads][head_dim]; with 0 queries [tokens][heads][head_dim] */
    int64_t layer_stride;    /* bytes between the keys and values of consecutive layers */
    int64_t head_stride;
    int64_t table_layer, table_stride; /* entries between the tables of consecutive layers, and heads */
    int64_t start, seen, first;
    int32_t tokens, stored, nodes, queries;
};

/* A pass of a few tokens of one or more sequences through layers `first` to `last - 1`. */
struct pass {
    const struct layer *layers;
    const struct sequence *sequences;
    void *x;               /* [rows][hidden], which is replaced */
    int64_t rows;
    int32_t first, last, count; /* count: of sequences */
    int32_t heads, kv_heads, head_dim, wide;
    float scale;
};

/* Tokens of a layer with linear attention. Heads have multiples of 16 dimensions, at most MAX_HEAD_DIM. */
struct delta {
    const void *rows;   /* [kernel - 1 + tokens][width]: q, k and v of all heads, those of the tokens before first */
    const float *gates; /* [tokens][2 * value_heads]: of rates, and of decays */
    const float *conv;  /* [kernel][width] */
    const float *decay, *bias; /* [value_heads] */
    float *state;       /* [value_heads][key_dim][value_dim], which is replaced by the one behind the tokens */
    float *out;         /* [tokens][value_heads][value_dim] */
    int64_t tokens, width;
    int32_t key_heads, value_heads, key_dim, value_dim, kernel, wide;
};

#endif
