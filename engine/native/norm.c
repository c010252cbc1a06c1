/* Root mean square norm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + epsilon) * weight, row by row. */
#include "pdmm.h"

#include <math.h>

#if defined(__x86_64__)

/* `width` is a multiple of 8; rows of x lie `x_stride` apart, those of y follow each other. */
EXPORT TARGET void pdmm_rms_norm(const float *x, size_t rows, size_t x_stride, size_t width, const float *weight,
                                 float epsilon, float *y)
{
    for (size_t row = 0; row < rows; row++, x += x_stride, y += width) {
        __m256 even = _mm256_setzero_ps(), odd = even;
        size_t i = 0;
        for (; i + 16 <= width; i += 16) {
            __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
            even = _mm256_fmadd_ps(a, a, even);
            odd = _mm256_fmadd_ps(b, b, odd);
        }
        if (i < width) {
            __m256 a = _mm256_loadu_ps(x + i);
            even = _mm256_fmadd_ps(a, a, even);
        }
        float parts[8], squares = 0;
        _mm256_storeu_ps(parts, _mm256_add_ps(even, odd));
        for (int p = 0; p < 8; p++)
            squares += parts[p];
        __m256 factor = _mm256_set1_ps(1.0f / sqrtf(squares / (float)width + epsilon));
        for (i = 0; i < width; i += 8)
            _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor),
                                                  _mm256_loadu_ps(weight + i)));
    }
}

#else

EXPORT void pdmm_rms_norm(const float *x, size_t rows, size_t x_stride, size_t width, const float *weight,
                          float epsilon, float *y)
{
    (void)x, (void)rows, (void)x_stride, (void)width, (void)weight, (void)epsilon, (void)y;
}

#endif
