// Owns the training form, forward and backward, of operations on the rows of fp32 matrices: gated
// activation, norm, residual mix, short convolution. It knows no tensor library: pointers and
// sizes come from the caller, all arrays are dense.

#include <cmath>
#include <cstdint>
#include <vector>

#include "elementwise.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using firstlight::training::exponential;
using firstlight::training::sigmoid;
using firstlight::training::tangent;
using std::int64_t;

// out = beta tanh(g / beta) sigmoid(g) * lin tanh(u / lin)
EXPORTED void gated_forward(int64_t n, const float* __restrict g, const float* __restrict u,
                            float* __restrict out, float beta, float lin) {
    const float inverse_beta = 1.0f / beta, inverse_lin = 1.0f / lin;
    for (int64_t i = 0; i < n; ++i) {
        out[i] = beta * tangent(g[i] * inverse_beta) * sigmoid(g[i]) *
                 (lin * tangent(u[i] * inverse_lin));
    }
}

EXPORTED void gated_backward(int64_t n, const float* __restrict g, const float* __restrict u,
                             const float* __restrict grad, float* __restrict dg,
                             float* __restrict du, float beta, float lin) {
    const float inverse_beta = 1.0f / beta, inverse_lin = 1.0f / lin;
    for (int64_t i = 0; i < n; ++i) {
        const float bent = tangent(g[i] * inverse_beta), open = sigmoid(g[i]);
        const float bounded = tangent(u[i] * inverse_lin);
        dg[i] = grad[i] * lin * bounded * open *
                ((1.0f - bent * bent) + beta * bent * (1.0f - open));
        du[i] = grad[i] * beta * bent * open * (1.0f - bounded * bounded);
    }
}

// out = x * inverse * w with inverse = 1 / sqrt(mean x^2 + eps), kept for the way back.
EXPORTED void norm_forward(int64_t rows, int64_t width, const float* __restrict x,
                           const float* __restrict w, float eps, float* __restrict out,
                           float* __restrict inverse) {
    for (int64_t t = 0; t < rows; ++t) {
        const float* row = x + t * width;
        float total = 0.0f;
        for (int64_t i = 0; i < width; ++i) total += row[i] * row[i];
        const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
        inverse[t] = scale;
        float* to = out + t * width;
        for (int64_t i = 0; i < width; ++i) to[i] = row[i] * scale * w[i];
    }
}

// Adds to dw.
EXPORTED void norm_backward(int64_t rows, int64_t width, const float* __restrict x,
                            const float* __restrict w, const float* __restrict inverse,
                            const float* __restrict grad, float* __restrict dx,
                            float* __restrict dw) {
    for (int64_t t = 0; t < rows; ++t) {
        const float *row = x + t * width, *from = grad + t * width;
        const float scale = inverse[t];
        float along = 0.0f;
        for (int64_t i = 0; i < width; ++i) along += from[i] * w[i] * row[i];
        along *= scale * scale * scale / static_cast<float>(width);
        float* to = dx + t * width;
        for (int64_t i = 0; i < width; ++i) {
            to[i] = from[i] * w[i] * scale - row[i] * along;
            dw[i] += from[i] * row[i] * scale;
        }
    }
}

// out = sum_i share_i v_i over `banked` rows and the current one, share = softmax of
// <v_i, query> inverse_i. Shares and inverses [rows, banked + 1] are kept for the way back.
EXPORTED void mix_forward(int64_t rows, int64_t banked, int64_t width,
                          const float* __restrict bank, const float* __restrict current,
                          const float* __restrict query, float eps, float* __restrict out,
                          float* __restrict shares, float* __restrict inverses) {
    const int64_t all = banked + 1;
    for (int64_t t = 0; t < rows; ++t) {
        float *share = shares + t * all, *inverse = inverses + t * all;
        float best = -INFINITY;
        for (int64_t b = 0; b < all; ++b) {
            const float* v = b < banked ? bank + (t * banked + b) * width : current + t * width;
            float square = 0.0f, asked = 0.0f;
            for (int64_t i = 0; i < width; ++i) {
                square += v[i] * v[i];
                asked += v[i] * query[i];
            }
            inverse[b] = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
            share[b] = asked * inverse[b];
            best = share[b] > best ? share[b] : best;
        }
        float total = 0.0f;
        for (int64_t b = 0; b < all; ++b) {
            share[b] = exponential(share[b] - best);
            total += share[b];
        }
        float* to = out + t * width;
        for (int64_t b = 0; b < all; ++b) {
            const float* v = b < banked ? bank + (t * banked + b) * width : current + t * width;
            share[b] /= total;
            const float weight = share[b];
            if (b == 0) {
                for (int64_t i = 0; i < width; ++i) to[i] = weight * v[i];
            } else {
                for (int64_t i = 0; i < width; ++i) to[i] += weight * v[i];
            }
        }
    }
}

// Adds to dquery.
EXPORTED void mix_backward(int64_t rows, int64_t banked, int64_t width,
                           const float* __restrict bank, const float* __restrict current,
                           const float* __restrict query, const float* __restrict shares,
                           const float* __restrict inverses, const float* __restrict grad,
                           float* __restrict dbank, float* __restrict dcurrent,
                           float* __restrict dquery) {
    const int64_t all = banked + 1;
    std::vector<float> pulls(all), scores(all);
    for (int64_t t = 0; t < rows; ++t) {
        const float *share = shares + t * all, *inverse = inverses + t * all;
        const float* from = grad + t * width;
        float mean = 0.0f;
        for (int64_t b = 0; b < all; ++b) {
            const float* v = b < banked ? bank + (t * banked + b) * width : current + t * width;
            float pull = 0.0f, asked = 0.0f;
            for (int64_t i = 0; i < width; ++i) {
                pull += v[i] * from[i];
                asked += v[i] * query[i];
            }
            pulls[b] = pull;
            scores[b] = asked * inverse[b];
            mean += share[b] * pull;
        }
        for (int64_t b = 0; b < all; ++b) {
            const bool in_bank = b < banked;
            const float* v = in_bank ? bank + (t * banked + b) * width : current + t * width;
            float* to = in_bank ? dbank + (t * banked + b) * width : dcurrent + t * width;
            const float weight = share[b], dscore = weight * (pulls[b] - mean);
            const float along = dscore * inverse[b];
            const float back =
                dscore * scores[b] * inverse[b] * inverse[b] / static_cast<float>(width);
            for (int64_t i = 0; i < width; ++i) {
                to[i] = weight * from[i] + along * query[i] - back * v[i];
                dquery[i] += along * v[i];
            }
        }
    }
}

// out = silu(y), y[t] = sum_j w[j] x[t - taps + 1 + j] within each sequence; w is [taps, width].
EXPORTED void convolution_forward(int64_t sequences, const int64_t* starts, int64_t width,
                                  int64_t taps, const float* __restrict x,
                                  const float* __restrict w, float* __restrict y,
                                  float* __restrict out) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
            float *sum = y + t * width, *to = out + t * width;
            for (int64_t i = 0; i < width; ++i) sum[i] = 0.0f;
            for (int64_t j = 0; j < taps; ++j) {
                const int64_t place = t - taps + 1 + j;
                if (place < starts[s]) continue;
                const float *row = x + place * width, *tap = w + j * width;
                for (int64_t i = 0; i < width; ++i) sum[i] += row[i] * tap[i];
            }
            for (int64_t i = 0; i < width; ++i) to[i] = sum[i] * sigmoid(sum[i]);
        }
    }
}

// Writes dx, adds to dw; `y` becomes its own gradient.
EXPORTED void convolution_backward(int64_t sequences, const int64_t* starts, int64_t width,
                                   int64_t taps, const float* __restrict x,
                                   const float* __restrict w, const float* __restrict grad,
                                   float* __restrict y, float* __restrict dx,
                                   float* __restrict dw) {
    for (int64_t i = 0; i < starts[sequences] * width; ++i) {
        const float open = sigmoid(y[i]);
        y[i] = grad[i] * open * (1.0f + y[i] * (1.0f - open));
        dx[i] = 0.0f;
    }
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
            const float* dy = y + t * width;
            for (int64_t j = 0; j < taps; ++j) {
                const int64_t place = t - taps + 1 + j;
                if (place < starts[s]) continue;
                const float *row = x + place * width, *tap = w + j * width;
                float *to = dx + place * width, *dtap = dw + j * width;
                for (int64_t i = 0; i < width; ++i) {
                    to[i] += dy[i] * tap[i];
                    dtap[i] += dy[i] * row[i];
                }
            }
        }
    }
}
