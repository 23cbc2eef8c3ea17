/* What the kernel is called with, and the constants of its layout. Mirrored by offload/kernels/native/library.py. */
#ifndef TRIFORCE_TYPES_H
#define TRIFORCE_TYPES_H

#include <stdint.h>

/*
 * Keys and values lie in blocks of 16 tokens, one KV head's keys and values beside each other:
 *
 *     bf16   keys [head_dim / 2][16][2]   values [8][head_dim][2]    pairs of dimensions, pairs of tokens
 *     fp32   keys [head_dim][16]          values [16][head_dim]
 *
 * A pair fills one 32-bit lane: a dot-product instruction for bf16 takes it whole, other machines split it with a shift
 * and a mask. Weights lie in panels of 16 outputs in the layout of the keys.
 */
enum {
    LAYOUT = 2,      /* to be raised with any change of what Python sees */
    BLOCK = 16,      /* tokens of a block, outputs of a panel */
    SPAN = 32,       /* tokens between two looks at the running maximum */
    PIECE = 512,     /* tokens of a part whose partial result stands alone, so that cores can share a head */
    ROW_GROUP = 60,  /* query rows that read a span together: a multiple of every level's rows a tile */
    MAX_HEAD_DIM = 256,
    MOST_PARTIALS = 1 << 26, /* bytes of partial results that are worth it while many rows are prefilled */
};

/* Attention of `tokens` queries over stored keys and values; a row is a query of one head. */
struct attention {
    const void *q;        /* [tokens][kv_heads * group][head_dim], in the type of the KV, rotated */
    const char *kv;       /* the first head's first block */
    const int32_t *table; /* block numbers [kv_heads][table_stride] in the order to be read; NULL: 0, 1, 2, ... */
    void *out;            /* [tokens][kv_heads * group][head_dim], fp32, or bf16 where narrow_out is set */
    float *lse;           /* [tokens][kv_heads * group], log of the summed exponentials; may be NULL */
    int64_t head_stride;  /* bytes from one head's blocks to the next one's */
    int64_t table_stride; /* numbers from one head's table to the next one's */
    int64_t seen;         /* keys that the first token sees, counted along the table; at least 1 */
    int32_t causal;       /* 1: each further token sees one key more */
    int32_t tokens, kv_heads, group, head_dim;
    int32_t wide;         /* 1: fp32 KV and queries, 0: bf16 */
    int32_t narrow_out;
    float scale;
    /*
     * NULL, or where the partial result of each PIECE of keys goes in place of out and lse, to be merged by the caller:
     * [pieces][tokens][kv_heads * group][2 + head_dim], of each row the running maximum, the sum, the output.
     */
    float *partials;
};

/* Partial results over keys that follow each other: fold `pieces` of them, in order, into the one before them. */
struct merge {
    float *into;           /* [rows][2 + head_dim]; maximum -INFINITY, sum 0 and output 0 where nothing came before */
    const float *partials; /* [pieces][rows][2 + head_dim] */
    void *out;             /* NULL, or [rows][head_dim], fp32 or bf16: attention over all that has been folded */
    int64_t rows, pieces;
    int32_t head_dim;
    int32_t narrow_out;
};

/* New tokens: queries are rotated, keys are rotated and stored, values are stored. */
struct append {
    const void *q, *k, *v;   /* [tokens][heads or kv_heads][head_dim], heads side by side */
    const void *cos, *sin;   /* [tokens][head_dim] */
    void *turned;            /* [tokens][heads][head_dim], the rotated queries */
    char *kv;                /* the first head's first block */
    int64_t q_stride, k_stride, v_stride; /* elements from one token to the next */
    int64_t head_stride;     /* bytes */
    int64_t start;           /* the first token's place */
    int32_t tokens;
    int32_t stored;          /* so many of them are stored already */
    int32_t heads, kv_heads, head_dim;
    int32_t wide;
};

/* y = x W^T (+ bias) (+ onto); the weights in panels of 16 outputs, the last one filled up with zeros. */
struct linear {
    const void *x;      /* [rows][inputs], in the type of the weights */
    const char *weight; /* [panels][inputs / 2][16][2] bf16 or [panels][inputs][16] fp32 */
    const float *bias;  /* [outputs] or NULL */
    const void *onto;   /* [rows][outputs] to be added, or NULL; may be y itself */
    void *y;            /* [rows][outputs] in the type of the weights, or fp32 where wide_out is set */
    int64_t rows, inputs, outputs;
    int32_t wide;
    int32_t wide_out;
};

/* Rows [width] each: RMSNorm of x with a weight, or, without one, silu(gate) * up of rows [gate, up] of twice that. */
struct norm {
    const void *x, *weight;
    void *y;
    int64_t rows, width; /* width: a multiple of 16 */
    float epsilon;
    int32_t wide;
};

#endif
