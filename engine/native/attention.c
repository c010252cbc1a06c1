/* Attention of sequences that decode, one query token each, over the paged cache where it lies.
 *
 * It reads each key and value once, in the cache's own type. Gathering them first would read, write and read them
 * again, widened if the arithmetic is wider than the cache.
 *
 *   layer     planes of slots: K of each KV head, then V of each; a slot is a row of head_dim elements, and block b has
 *             slots [b * block_size, (b + 1) * block_size)
 *   work      pieces of one sequence and one KV head, whose query heads share the keys that are read
 *
 * Every output is computed in the same order of operations whatever else is in the step.
 */
#include "vectors.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct attention {
    const char *layer;
    int32_t type;
    int32_t kv_heads, group; /* `group` query heads read one KV head */
    int32_t head_dim;        /* a multiple of 8 */
    int32_t block_size;      /* a multiple of 4 */
    int32_t window;          /* a query sees so many tokens, its own included; 0: all */
    int32_t num_seqs;
    float scale;
    size_t plane;          /* slots of a plane */
    const float *q;        /* [num_seqs, kv_heads * group * head_dim], rows `q_stride` apart */
    size_t q_stride;
    const int32_t *tables; /* [num_seqs, table_width]: the sequences' block tables */
    size_t table_width;
    const int32_t *lengths; /* tokens of each, the query's own included */
    float *out;             /* [num_seqs, kv_heads * group * head_dim] */
};

#if defined(__x86_64__)

struct work {
    const struct attention *attention;
    size_t room; /* tokens that the longest sequence has, and three more */
    size_t next; /* the piece that nobody has taken yet */
    int failed;
};

INLINE __m128 sums_of_four(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* As in linear.c: sums have names, for a compiler keeps an array of them in memory. Twelve at most. */
#define EACH_SUM(do) do(0) do(1) do(2) do(3) do(4) do(5) do(6) do(7) do(8) do(9) do(10) do(11)
#define CLEAR(s) __m256 sum##s = _mm256_setzero_ps();

/* Scores of `heads` query heads with four tokens that are adjacent. Sum s: token s / heads, head s % heads. */
#define DOT(s)                                                                                                         \
    if (s < 4 * heads) {                                                                                               \
        if (s % heads == 0)                                                                                            \
            key = load8(keys, (size_t)(s / heads) * head_dim + d, type);                                               \
        sum##s = _mm256_fmadd_ps(key, _mm256_loadu_ps(q + (s % heads) * head_dim + d), sum##s);                        \
    }

INLINE void score4(const char *keys, const float *q, size_t head_dim, float scale, float *scores, size_t room,
                   const int heads, const int type)
{
    EACH_SUM(CLEAR)
    __m256 key = _mm256_setzero_ps();
    for (size_t d = 0; d < head_dim; d += 8) {
        EACH_SUM(DOT)
    }
    __m128 factor = _mm_set1_ps(scale);
    if (heads == 1) {
        _mm_storeu_ps(scores, _mm_mul_ps(factor, sums_of_four(sum0, sum1, sum2, sum3)));
    } else if (heads == 2) {
        _mm_storeu_ps(scores, _mm_mul_ps(factor, sums_of_four(sum0, sum2, sum4, sum6)));
        _mm_storeu_ps(scores + room, _mm_mul_ps(factor, sums_of_four(sum1, sum3, sum5, sum7)));
    } else {
        _mm_storeu_ps(scores, _mm_mul_ps(factor, sums_of_four(sum0, sum3, sum6, sum9)));
        _mm_storeu_ps(scores + room, _mm_mul_ps(factor, sums_of_four(sum1, sum4, sum7, sum10)));
        _mm_storeu_ps(scores + 2 * room, _mm_mul_ps(factor, sums_of_four(sum2, sum5, sum8, sum11)));
    }
}

/* Turn the scores of tokens [first, length) into e^(score - the largest); returns their sum. */
INLINE float soften(float *scores, size_t first, size_t length)
{
    __m256 most = _mm256_set1_ps(-INFINITY);
    size_t t = first;
    for (; t + 8 <= length; t += 8)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + t));
    float top = largest(most);
    for (; t < length; t++)
        top = scores[t] > top ? scores[t] : top;
    __m256 tops = _mm256_set1_ps(top), total = _mm256_setzero_ps();
    for (t = first; t + 8 <= length; t += 8) {
        __m256 p = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), tops));
        _mm256_storeu_ps(scores + t, p);
        total = _mm256_add_ps(total, p);
    }
    float rest[8];
    for (size_t i = 0; i < 8; i++)
        rest[i] = t + i < length ? scores[t + i] - top : -FLT_MAX;
    __m256 p = exponential(_mm256_loadu_ps(rest));
    _mm256_storeu_ps(rest, p);
    for (size_t i = 0; t + i < length; i++)
        scores[t + i] = rest[i];
    return sum(_mm256_add_ps(total, p));
}

/* Mix `vectors` times 8 dims of the values of tokens [from, to) of one block. Sum s: dims s / heads, head s % heads. */
#define MIX(s)                                                                                                         \
    if (s < vectors * heads) {                                                                                         \
        if (s % heads == 0)                                                                                            \
            value = load8(values, (t - begin) * head_dim + 8 * (s / heads), type);                                     \
        sum##s = _mm256_fmadd_ps(value, _mm256_broadcast_ss(weights + (s % heads) * room + t), sum##s);                \
    }
#define TAKE(s)                                                                                                        \
    if (s < vectors * heads)                                                                                           \
        sum##s = _mm256_loadu_ps(out + (s % heads) * head_dim + 8 * (s / heads));
#define PUT(s)                                                                                                         \
    if (s < vectors * heads)                                                                                           \
        _mm256_storeu_ps(out + (s % heads) * head_dim + 8 * (s / heads), sum##s);

INLINE void mix(const char *values, const float *weights, size_t room, size_t begin, size_t from, size_t to,
                size_t head_dim, float *out, const int vectors, const int heads, const int type)
{
    EACH_SUM(CLEAR)
    EACH_SUM(TAKE)
    __m256 value = _mm256_setzero_ps();
    for (size_t t = from; t < to; t++) {
        EACH_SUM(MIX)
    }
    EACH_SUM(PUT)
}

/* `heads` query heads of one sequence, which share a KV head. */
INLINE void attend(const struct attention *a, size_t seq, size_t kv_head, size_t query_head, float *scores, size_t room,
                   const int heads, const int type)
{
    const size_t width = type == FLOAT32 ? 4 : 2, head_dim = (size_t)a->head_dim, block = (size_t)a->block_size;
    const size_t length = (size_t)a->lengths[seq];
    const size_t first = a->window && length > (size_t)a->window ? length - (size_t)a->window : 0;
    const int32_t *table = a->tables + seq * a->table_width;
    const char *keys = a->layer + kv_head * a->plane * head_dim * width;
    const char *values = a->layer + ((size_t)a->kv_heads + kv_head) * a->plane * head_dim * width;
    const float *q = a->q + seq * a->q_stride + query_head * head_dim;
    float *out = a->out + (seq * (size_t)a->kv_heads * (size_t)a->group + query_head) * head_dim;

    for (size_t t = first / 4 * 4; t < length; t += 4) {
        const char *slots = keys + ((size_t)table[t / block] * block + t % block) * head_dim * width;
        score4(slots, q, head_dim, a->scale, scores + t, room, heads, type);
    }
    float total[3];
    for (int h = 0; h < heads; h++)
        total[h] = soften(scores + (size_t)h * room, first, length);
    memset(out, 0, (size_t)heads * head_dim * sizeof(float));
    for (size_t begin = first / block * block; begin < length; begin += block) {
        const char *slots = values + (size_t)table[begin / block] * block * head_dim * width;
        size_t from = begin < first ? first : begin, to = begin + block < length ? begin + block : length;
        size_t d = 0;
        for (; d + 32 <= head_dim; d += 32)
            mix(slots + d * width, scores, room, begin, from, to, head_dim, out + d, 4, heads, type);
        for (; d < head_dim; d += 8)
            mix(slots + d * width, scores, room, begin, from, to, head_dim, out + d, 1, heads, type);
    }
    for (int h = 0; h < heads; h++) {
        __m256 factor = _mm256_set1_ps(1.0f / total[h]);
        for (size_t d = 0; d < head_dim; d += 8) {
            float *place = out + (size_t)h * head_dim + d;
            _mm256_storeu_ps(place, _mm256_mul_ps(_mm256_loadu_ps(place), factor));
        }
    }
}

#define ATTEND(type)                                                                                                   \
    TARGET static void attend_##type(const struct attention *a, size_t seq, size_t kv_head, size_t query_head,         \
                                     size_t heads, float *scores, size_t room)                                         \
    {                                                                                                                  \
        if (heads == 1)                                                                                                \
            attend(a, seq, kv_head, query_head, scores, room, 1, type);                                                \
        else if (heads == 2)                                                                                           \
            attend(a, seq, kv_head, query_head, scores, room, 2, type);                                                \
        else                                                                                                           \
            attend(a, seq, kv_head, query_head, scores, room, 3, type);                                                \
    }

ATTEND(FLOAT32)
ATTEND(BFLOAT16)
ATTEND(FLOAT16)

static void take_pieces(void *data)
{
    struct work *work = data;
    const struct attention *a = work->attention;
    size_t kv_heads = (size_t)a->kv_heads, group = (size_t)a->group;
    float *scores = malloc(3 * work->room * sizeof(float));
    if (!scores) {
        work->failed = 1;
        return;
    }
    for (;;) {
        size_t piece = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (piece >= (size_t)a->num_seqs * kv_heads)
            break;
        size_t seq = piece / kv_heads, kv_head = piece % kv_heads;
        for (size_t done = 0; done < group; done += 3) {
            size_t heads = group - done < 3 ? group - done : 3, query_head = kv_head * group + done;
            if (a->type == FLOAT32)
                attend_FLOAT32(a, seq, kv_head, query_head, heads, scores, work->room);
            else if (a->type == BFLOAT16)
                attend_BFLOAT16(a, seq, kv_head, query_head, heads, scores, work->room);
            else
                attend_FLOAT16(a, seq, kv_head, query_head, heads, scores, work->room);
        }
    }
    free(scores);
}

/* Returns 0 if there was no memory. */
EXPORT int pdmm_attend(const struct attention *attention, unsigned threads)
{
    struct work work = {attention, 0, 0, 0};
    for (size_t seq = 0; seq < (size_t)attention->num_seqs; seq++)
        if ((size_t)attention->lengths[seq] > work.room)
            work.room = (size_t)attention->lengths[seq];
    work.room = (work.room + 3) / 4 * 4;
    in_parallel(take_pieces, &work, threads);
    return !work.failed;
}

#else

EXPORT int pdmm_attend(const struct attention *attention, unsigned threads)
{
    (void)attention, (void)threads;
    return 0;
}

#endif
