/* Linear layers with bfloat16 weights and float32 arithmetic, for x86 CPUs that have AVX2 and no bfloat16 products.
 *
 * A decode step reads every weight once and does little with it, so its time is that of reading: half the bytes are
 * half the time. A bfloat16 is the upper half of a float32, so that widening costs a shift or a mask.
 *
 *   weights   [n, k], row by row: y[m, n] = sum over k of x[m, k] * weights[n, k]
 *   panel     16 outputs: for each k 16 weights, as 8 words of 32 bits; word i holds output i in its lower half and
 *             output 8 + i in its upper half. The last panel is filled up with zeros.
 *
 * Each y[m, n] is one chain of fused multiply-adds from k = 0 upwards, whatever m, the tile or the number of threads:
 * a row's result does not depend on the rows beside it.
 */
#include "pdmm.h"

#include <stdlib.h>
#include <string.h>

#define PANEL 16
#define ROWS 6 /* of a tile: with 16 outputs they need 12 of the 16 registers */
#define CACHED_BYTES (256 << 10)

/* Bytes that hold the packed weights. */
EXPORT size_t pdmm_packed_bytes(size_t n, size_t k)
{
    return (n + PANEL - 1) / PANEL * PANEL * k * sizeof(uint16_t);
}

EXPORT void pdmm_pack(const uint16_t *weights, size_t n, size_t k, uint16_t *packed)
{
    for (size_t first = 0; first < n; first += PANEL) {
        uint16_t *panel = packed + first * k;
        for (size_t i = 0; i < PANEL; i++) {
            uint16_t *place = panel + (i < 8 ? 2 * i : 2 * (i - 8) + 1);
            const uint16_t *row = weights + (first + i) * k;
            for (size_t j = 0; j < k; j++)
                place[j * PANEL] = first + i < n ? row[j] : 0;
        }
    }
}

#if defined(__x86_64__)
/* One call: a share of the panels is a thread's. */
struct job {
    const float *x;
    size_t m, x_stride;
    const uint16_t *packed;
    size_t n, k;
    const float *bias;     /* [n], or NULL */
    const float *residual; /* [m, n], or NULL */
    const float *ordered;  /* x as `order_rows` puts it, for more than ROWS rows; else NULL */
    float *y;              /* [m, n] */
};

INLINE void store(const struct job *job, size_t row, size_t first, __m256 low, __m256 high)
{
    float values[PANEL];
    _mm256_storeu_ps(values, low);
    _mm256_storeu_ps(values + 8, high);
    float *y = job->y + row * job->n + first;
    size_t width = job->n - first < PANEL ? job->n - first : PANEL;
    if (job->bias)
        for (size_t i = 0; i < width; i++)
            values[i] += job->bias[first + i];
    if (job->residual)
        for (size_t i = 0; i < width; i++)
            values[i] += job->residual[row * job->n + first + i];
    memcpy(y, values, width * sizeof(float));
}

/* `rows` rows by `panels` panels, both constants where it is used and their product at most 6. Element j of row r is
 * x[r * across + j * along]. Sums are named, not in an array: a compiler keeps an array in memory. Sum s belongs to row
 * s % rows and panel s / rows. */
#define EACH_SUM(do) do(0) do(1) do(2) do(3) do(4) do(5)
#define CLEAR(s) __m256 low##s = _mm256_setzero_ps(), high##s = _mm256_setzero_ps();
#define ADD(s)                                                                                                         \
    if (s < rows * panels) {                                                                                           \
        if (s % rows == 0) {                                                                                           \
            __m256i words = _mm256_loadu_si256((const __m256i *)(weights + ((size_t)(s / rows) * k + j) * PANEL));     \
            a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));                                                     \
            b = _mm256_castsi256_ps(_mm256_and_si256(words, upper));                                                   \
        }                                                                                                              \
        __m256 value = _mm256_broadcast_ss(x + (size_t)(s % rows) * across + j * along);                               \
        low##s = _mm256_fmadd_ps(value, a, low##s);                                                                    \
        high##s = _mm256_fmadd_ps(value, b, high##s);                                                                  \
    }
#define STORE(s)                                                                                                       \
    if (s < rows * panels)                                                                                             \
        store(job, row + (size_t)(s % rows), first + (size_t)(s / rows) * PANEL, low##s, high##s);

INLINE void tile(const struct job *job, const float *x, size_t across, size_t along, size_t row, size_t first,
                 const int rows, const int panels)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    const size_t k = job->k;
    const uint16_t *weights = job->packed + first * k;
    EACH_SUM(CLEAR)
    for (size_t j = 0; j < k; j++) {
        __m256 a = _mm256_setzero_ps(), b = a;
        EACH_SUM(ADD)
    }
    EACH_SUM(STORE)
}

/* Few rows, as they lie: panels [begin, end), as many at once as hide the latency of the additions. */
#define BAND(rows, panels)                                                                                             \
    TARGET static void band_##rows(const struct job *job, size_t begin, size_t end)                                    \
    {                                                                                                                  \
        size_t panel = begin;                                                                                          \
        for (; panel + panels <= end; panel += panels)                                                                 \
            tile(job, job->x, job->x_stride, 1, 0, panel * PANEL, rows, panels);                                       \
        for (; panel < end; panel++)                                                                                   \
            tile(job, job->x, job->x_stride, 1, 0, panel * PANEL, rows, 1);                                            \
    }                                                                                                                  \
    /* Many rows, put in order: `rows` of them, element by element, and one panel. */                                  \
    TARGET static void cell_##rows(const struct job *job, const float *x, size_t row, size_t panel)                    \
    {                                                                                                                  \
        tile(job, x, 1, rows, row, panel *PANEL, rows, 1);                                                             \
    }

BAND(1, 4)
BAND(2, 3)
BAND(3, 2)
BAND(4, 1)
BAND(5, 1)
BAND(6, 1)

typedef void (*band_t)(const struct job *job, size_t begin, size_t end);
typedef void (*cell_t)(const struct job *job, const float *x, size_t row, size_t panel);

static const band_t bands[] = {NULL, band_1, band_2, band_3, band_4, band_5, band_6};
static const cell_t cells[] = {NULL, cell_1, cell_2, cell_3, cell_4, cell_5, cell_6};

/* Put rows in order: for each ROWS of them (the last ones may be fewer) element 0 of each, element 1 of each... */
static void order_rows(const struct job *job, float *ordered)
{
    for (size_t row = 0; row < job->m; row += ROWS) {
        size_t rows = job->m - row < ROWS ? job->m - row : ROWS;
        float *block = ordered + row * job->k;
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < job->k; j++)
                block[j * rows + r] = job->x[(row + r) * job->x_stride + j];
    }
}

/* The panels of one thread. Of many rows, as many go through all panels as the core's second cache holds; a panel stays
 * in its first one meanwhile. */
static void run_share(const struct job *job, size_t begin, size_t end)
{
    if (!job->ordered) {
        bands[job->m](job, begin, end);
        return;
    }
    size_t chunk = CACHED_BYTES / (job->k * sizeof(float)) / ROWS * ROWS;
    chunk = chunk < ROWS ? ROWS : chunk;
    for (size_t from = 0; from < job->m; from += chunk) {
        size_t to = job->m - from < chunk ? job->m : from + chunk;
        for (size_t panel = begin; panel < end; panel++)
            for (size_t row = from; row < to; row += ROWS)
                cells[to - row < ROWS ? to - row : ROWS](job, job->ordered + row * job->k, row, panel);
    }
}

static void share_of_thread(void *data)
{
    const struct job *job = data;
    struct share share = my_share((job->n + PANEL - 1) / PANEL);
    run_share(job, share.begin, share.end);
}

/* Returns 0 if there was no memory. */
EXPORT int pdmm_linear(const float *x, size_t m, size_t x_stride, const uint16_t *packed, size_t n, size_t k,
                       const float *bias, const float *residual, float *y, unsigned threads)
{
    float *ordered = NULL;
    struct job job = {x, m, x_stride, packed, n, k, bias, residual, NULL, y};
    if (m > ROWS) {
        ordered = malloc(m * k * sizeof(float));
        if (!ordered)
            return 0;
        order_rows(&job, ordered);
        job.ordered = ordered;
    }
    in_parallel(share_of_thread, &job, threads);
    free(ordered);
    return 1;
}

#else

EXPORT int pdmm_linear(const float *x, size_t m, size_t x_stride, const uint16_t *packed, size_t n, size_t k,
                       const float *bias, const float *residual, float *y, unsigned threads)
{
    (void)x, (void)m, (void)x_stride, (void)packed, (void)n, (void)k;
    (void)bias, (void)residual, (void)y, (void)threads;
    return 0;
}

#endif
