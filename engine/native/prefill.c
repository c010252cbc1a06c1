/* Attention of prompts, several query tokens of each sequence, over the paged cache where it lies.
 *
 * One call does a layer, on all threads and without a tensor of scores: softmax goes along with the keys (Milakov and
 * Gimelshein 2018; Dao et al. 2022), KEYS of them at a time.
 *
 *   rows      (query token, query head) of one KV head, for these share the keys that are read; ROWS at a time are in
 *             registers. Row r of a piece: token r / group, head r % group.
 *   piece     one sequence, one KV head, and some adjacent query tokens: what a thread takes at a time
 *
 *   queries   [rows / ROWS][head_dim][ROWS], scaled            keys    [KEYS / PANEL][head_dim][PANEL]
 *   scores    [ROWS][KEYS]                                     values  [KEYS][head_dim]
 *
 * Keys are taken in stretches of KEYS from token 0 on, so each row is computed in the same order of operations however
 * the prompt is cut into chunks and pieces, and whatever else is in the step.
 */
#include "vectors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 6 /* with 16 columns they need 12 of the 16 registers */
#define PANEL 16
#define KEYS 256
#define PIECE_FLOATS (24 << 10) /* queries of a piece: with sums, keys and values they fit the second cache */
#define PIECES_PER_THREAD 4

struct prefill {
    const char *layer;
    int32_t type;
    int32_t kv_heads, group; /* `group` query heads read one KV head */
    int32_t head_dim;        /* a multiple of 8 */
    int32_t block_size;      /* a multiple of 8 */
    int32_t window;          /* a query sees so many tokens, its own included; 0: all */
    int32_t num_seqs;
    float scale;
    size_t plane;   /* slots of a plane */
    const float *q; /* [tokens, kv_heads * group * head_dim], rows `q_stride` apart */
    size_t q_stride;
    const int32_t *tables; /* [num_seqs, table_width]: the sequences' block tables */
    size_t table_width;
    const int32_t *lengths; /* tokens of each in the cache, those of its queries included */
    const int32_t *starts;  /* [num_seqs + 1]: a sequence's queries are rows [starts[s], starts[s + 1]) of q and out */
    float *out;             /* [tokens, kv_heads * group * head_dim] */
};

#if defined(__x86_64__)

struct job {
    const struct prefill *prefill;
    size_t tokens; /* query tokens of a piece at most */
    size_t pieces, next;
    int failed;
};

/* What a thread works with; sizes in floats. */
struct room {
    float *queries, *sums; /* [rows, head_dim] each */
    float *tops, *totals;  /* [rows]: the largest score so far, and the sum of e^(score - it) */
    float *keys, *values;  /* [KEYS, head_dim] each */
    float *scores;         /* [ROWS, KEYS] */
};

/* Eight rows of eight floats to eight columns, PANEL apart. */
INLINE void transpose8(const __m256 *rows, float *to)
{
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + PANEL * i, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(to + PANEL * (i + 4), _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

/* Keys and values of tokens [first, first + KEYS). Those from `length` on are zeros, for there is nothing, or nobody
 * knows what; those before `seen`, but in blocks that reach it, are too: nobody looks at them. */
INLINE void take_keys(const struct prefill *a, size_t seq, size_t kv_head, size_t first, size_t seen,
                      const struct room *room, const int type)
{
    const size_t head_dim = (size_t)a->head_dim, block = (size_t)a->block_size, length = (size_t)a->lengths[seq];
    const size_t width = type == FLOAT32 ? 4 : 2;
    const int32_t *table = a->tables + seq * a->table_width;
    const char *keys = a->layer + kv_head * a->plane * head_dim * width;
    const char *values = a->layer + ((size_t)a->kv_heads + kv_head) * a->plane * head_dim * width;
    for (size_t t = 0; t < KEYS; t += 8) {
        size_t token = first + t, real = length - token < 8 ? length - token : 8;
        if (token >= length || token + 8 <= seen)
            real = 0;
        size_t slot = real ? (size_t)table[token / block] * block + token % block : 0;
        float *panel = room->keys + t / PANEL * PANEL * head_dim + t % PANEL, *copy = room->values + t * head_dim;
        for (size_t d = 0; d < head_dim; d += 8) {
            __m256 rows[8];
            for (size_t i = 0; i < real; i++) {
                rows[i] = load8(keys, (slot + i) * head_dim + d, type);
                _mm256_storeu_ps(copy + i * head_dim + d, load8(values, (slot + i) * head_dim + d, type));
            }
            for (size_t i = real; i < 8; i++) {
                rows[i] = _mm256_setzero_ps();
                _mm256_storeu_ps(copy + i * head_dim + d, rows[i]);
            }
            transpose8(rows, panel + d * PANEL);
        }
    }
}

/* As in linear.c: sums have names, for a compiler keeps an array of them in memory. */
#define EACH_ROW(do) do(0) do(1) do(2) do(3) do(4) do(5)
#define CLEAR(r) __m256 low##r = _mm256_setzero_ps(), high##r = low##r;
#define DOT(r)                                                                                                         \
    {                                                                                                                  \
        __m256 q = _mm256_broadcast_ss(queries + ROWS * d + r);                                                        \
        low##r = _mm256_fmadd_ps(q, low, low##r);                                                                      \
        high##r = _mm256_fmadd_ps(q, high, high##r);                                                                   \
    }
#define PUT_SCORES(r)                                                                                                  \
    _mm256_storeu_ps(scores + r * KEYS, low##r);                                                                       \
    _mm256_storeu_ps(scores + r * KEYS + 8, high##r);

/* Scores of ROWS rows with one panel of keys. */
INLINE void score(const float *queries, const float *keys, size_t head_dim, float *scores)
{
    EACH_ROW(CLEAR)
    for (size_t d = 0; d < head_dim; d++) {
        __m256 low = _mm256_loadu_ps(keys + PANEL * d), high = _mm256_loadu_ps(keys + PANEL * d + 8);
        EACH_ROW(DOT)
    }
    EACH_ROW(PUT_SCORES)
}

#define FADE(r)                                                                                                        \
    __m256 low##r, high##r = _mm256_setzero_ps();                                                                      \
    {                                                                                                                  \
        __m256 factor = _mm256_set1_ps(fade[r]);                                                                       \
        low##r = _mm256_mul_ps(factor, _mm256_loadu_ps(sums + r * head_dim));                                          \
        if (vectors == 2)                                                                                              \
            high##r = _mm256_mul_ps(factor, _mm256_loadu_ps(sums + r * head_dim + 8));                                 \
    }
#define MIX(r)                                                                                                         \
    {                                                                                                                  \
        __m256 weight = _mm256_broadcast_ss(weights + r * KEYS + t);                                                   \
        low##r = _mm256_fmadd_ps(weight, low, low##r);                                                                 \
        if (vectors == 2)                                                                                              \
            high##r = _mm256_fmadd_ps(weight, high, high##r);                                                          \
    }
#define PUT_SUMS(r)                                                                                                    \
    _mm256_storeu_ps(sums + r * head_dim, low##r);                                                                     \
    if (vectors == 2)                                                                                                  \
        _mm256_storeu_ps(sums + r * head_dim + 8, high##r);

/* Add `count` values, each with its weight, to the sums of ROWS rows, which fade first: 8 or 16 dims of each. */
INLINE void mix(const float *values, const float *weights, size_t count, size_t head_dim, const float *fade,
                float *sums, const int vectors)
{
    EACH_ROW(FADE)
    for (size_t t = 0; t < count; t++) {
        __m256 low = _mm256_loadu_ps(values + t * head_dim), high = _mm256_setzero_ps();
        if (vectors == 2)
            high = _mm256_loadu_ps(values + t * head_dim + 8);
        EACH_ROW(MIX)
    }
    EACH_ROW(PUT_SUMS)
}

/* Turn one row's `count` scores into e^(score - the largest of all so far); tokens outside [from, to) weigh nothing.
 * Returns by what earlier sums are to be multiplied. */
INLINE float soften(float *scores, size_t count, size_t from, size_t to, float *top, float *total)
{
    for (size_t t = 0; t < from && t < count; t++)
        scores[t] = -INFINITY;
    for (size_t t = to; t < count; t++)
        scores[t] = -INFINITY;
    __m256 most = _mm256_set1_ps(*top);
    for (size_t t = 0; t < count; t += 8)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + t));
    float now = largest(most), base = now == -INFINITY ? 0.0f : now;
    __m256 bases = _mm256_set1_ps(base), sums = _mm256_setzero_ps();
    for (size_t t = 0; t < count; t += 8) {
        __m256 p = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), bases));
        _mm256_storeu_ps(scores + t, p);
        sums = _mm256_add_ps(sums, p);
    }
    float fade = _mm256_cvtss_f32(exponential(_mm256_set1_ps(*top - base)));
    *total = *total * fade + sum(sums);
    *top = now;
    return fade;
}

/* `tokens` query tokens of a sequence, from its `begin`-th on, and one KV head. */
INLINE void attend(const struct prefill *a, size_t seq, size_t kv_head, size_t begin, size_t tokens,
                   const struct room *room, const int type)
{
    const size_t head_dim = (size_t)a->head_dim, group = (size_t)a->group, rows = tokens * group;
    const size_t padded = (rows + ROWS - 1) / ROWS * ROWS, width = (size_t)a->kv_heads * group * head_dim;
    const size_t token = (size_t)a->starts[seq] + begin;
    const size_t before = (size_t)a->lengths[seq] - (size_t)(a->starts[seq + 1] - a->starts[seq]) + begin;
    const size_t hidden = a->window ? (size_t)a->window - 1 : SIZE_MAX; /* tokens seen beside its own */

    memset(room->queries, 0, padded * head_dim * sizeof(float));
    memset(room->sums, 0, padded * head_dim * sizeof(float));
    for (size_t row = 0; row < padded; row++) {
        room->tops[row] = -INFINITY;
        room->totals[row] = 0.0f;
    }
    for (size_t row = 0; row < rows; row++) {
        const float *q = a->q + (token + row / group) * a->q_stride + (kv_head * group + row % group) * head_dim;
        float *place = room->queries + row / ROWS * ROWS * head_dim + row % ROWS;
        for (size_t d = 0; d < head_dim; d++)
            place[d * ROWS] = q[d] * a->scale;
    }
    const size_t seen = before > hidden ? before - hidden : 0;
    for (size_t first = seen / KEYS * KEYS; first < before + tokens; first += KEYS) {
        take_keys(a, seq, kv_head, first, seen, room, type);
        for (size_t row = 0; row < padded; row += ROWS) {
            size_t last = row + ROWS < rows ? row + ROWS - 1 : rows - 1;
            size_t end = before + last / group + 1; /* the last row sees tokens below this */
            if (end <= first || (before + row / group > hidden && before + row / group - hidden >= first + KEYS))
                continue;
            size_t count = end - first < KEYS ? (end - first + PANEL - 1) / PANEL * PANEL : KEYS;
            for (size_t panel = 0; panel < count; panel += PANEL)
                score(room->queries + row * head_dim, room->keys + panel * head_dim, head_dim, room->scores + panel);
            float fade[ROWS];
            for (size_t r = 0; r < ROWS; r++) {
                size_t at = row + r, position = before + (at < rows ? at : rows - 1) / group;
                size_t from = position > hidden && position - hidden > first ? position - hidden - first : 0;
                size_t to = position + 1 > first ? position + 1 - first : 0;
                fade[r] = soften(room->scores + r * KEYS, count, from, to, room->tops + at, room->totals + at);
            }
            float *sums = room->sums + row * head_dim;
            size_t d = 0;
            for (; d + 16 <= head_dim; d += 16)
                mix(room->values + d, room->scores, count, head_dim, fade, sums + d, 2);
            if (d < head_dim)
                mix(room->values + d, room->scores, count, head_dim, fade, sums + d, 1);
        }
    }
    for (size_t row = 0; row < rows; row++) {
        float *out = a->out + (token + row / group) * width + (kv_head * group + row % group) * head_dim;
        __m256 factor = _mm256_set1_ps(1.0f / room->totals[row]);
        for (size_t d = 0; d < head_dim; d += 8)
            _mm256_storeu_ps(out + d, _mm256_mul_ps(factor, _mm256_loadu_ps(room->sums + row * head_dim + d)));
    }
}

#define ATTEND(type)                                                                                                   \
    TARGET static void attend_##type(const struct prefill *a, size_t seq, size_t kv_head, size_t begin, size_t tokens, \
                                     const struct room *room)                                                          \
    {                                                                                                                  \
        attend(a, seq, kv_head, begin, tokens, room, type);                                                            \
    }

ATTEND(FLOAT32)
ATTEND(BFLOAT16)
ATTEND(FLOAT16)

static size_t queries_of(const struct prefill *a, size_t seq)
{
    return (size_t)(a->starts[seq + 1] - a->starts[seq]);
}

static size_t count_pieces(const struct prefill *a, size_t tokens)
{
    size_t pieces = 0;
    for (size_t seq = 0; seq < (size_t)a->num_seqs; seq++)
        pieces += (queries_of(a, seq) + tokens - 1) / tokens * (size_t)a->kv_heads;
    return pieces;
}

/* The piece of that number: those at a sequence's end, which see the most, come first. */
static void run_piece(const struct job *job, size_t number, const struct room *room)
{
    const struct prefill *a = job->prefill;
    size_t seq = 0, kv_heads = (size_t)a->kv_heads, cuts = 0;
    for (;; seq++) {
        cuts = (queries_of(a, seq) + job->tokens - 1) / job->tokens;
        if (number < cuts * kv_heads)
            break;
        number -= cuts * kv_heads;
    }
    size_t begin = (cuts - 1 - number / kv_heads) * job->tokens, left = queries_of(a, seq) - begin;
    size_t tokens = left < job->tokens ? left : job->tokens, kv_head = number % kv_heads;
    if (a->type == FLOAT32)
        attend_FLOAT32(a, seq, kv_head, begin, tokens, room);
    else if (a->type == BFLOAT16)
        attend_BFLOAT16(a, seq, kv_head, begin, tokens, room);
    else
        attend_FLOAT16(a, seq, kv_head, begin, tokens, room);
}

static void take_pieces(void *data)
{
    struct job *job = data;
    size_t head_dim = (size_t)job->prefill->head_dim;
    size_t rows = (job->tokens * (size_t)job->prefill->group + ROWS - 1) / ROWS * ROWS;
    float *memory = malloc((2 * rows * head_dim + 2 * rows + 2 * KEYS * head_dim + ROWS * KEYS) * sizeof(float));
    if (!memory) {
        job->failed = 1;
        return;
    }
    struct room room = {.queries = memory};
    room.sums = room.queries + rows * head_dim;
    room.tops = room.sums + rows * head_dim;
    room.totals = room.tops + rows;
    room.keys = room.totals + rows;
    room.values = room.keys + KEYS * head_dim;
    room.scores = room.values + KEYS * head_dim;
    for (;;) {
        size_t piece = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (piece >= job->pieces)
            break;
        run_piece(job, piece, &room);
    }
    free(memory);
}

/* Returns 0 if there was no memory. */
EXPORT int pdmm_prefill(const struct prefill *prefill, unsigned threads)
{
    size_t group = (size_t)prefill->group, most = PIECE_FLOATS / (group * (size_t)prefill->head_dim);
    size_t tokens = most ? most : 1;
    /* Short prompts: as many pieces as keep all threads busy to the end. */
    while (tokens * group > 4 * ROWS && count_pieces(prefill, tokens) < PIECES_PER_THREAD * (size_t)threads)
        tokens = (tokens + 1) / 2;
    struct job job = {prefill, tokens, count_pieces(prefill, tokens), 0, 0};
    in_parallel(take_pieces, &job, threads);
    return !job.failed;
}

#else

EXPORT int pdmm_prefill(const struct prefill *prefill, unsigned threads)
{
    (void)prefill, (void)threads;
    return 0;
}

#endif
