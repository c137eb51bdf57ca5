// Owns the training form, forward and backward, of the gated delta rule in fp32: token by token
// with the state in cache, which for small heads is faster than chunks. It knows no tensor library.
//
// S <- diag(exp decay) S; e = beta (v - S^T k); S <- S + k e^T; o = S^T q, S [K, V] per head.
// Backward begins from states kept every SPAN tokens and walks each span twice.

#include <cstdint>
#include <cstring>
#include <vector>

#include "elementwise.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using firstlight::training::exponential;
using std::int64_t;

namespace {

constexpr int64_t SPAN = 16;

struct Shape {
    int64_t sequences;
    const int64_t* starts;
    int64_t heads;
};

// One token forward. `decayed` (may be null) receives the state between decay and update.
template <int K, int V>
inline void advance(float* __restrict state, const float* __restrict k, const float* __restrict v,
                    const float* __restrict decay, float beta, float* __restrict error,
                    float* __restrict decayed) {
    float known[V] = {};
    for (int i = 0; i < K; ++i) {
        float* row = state + i * V;
        const float kept = decay[i], key = k[i];
        for (int j = 0; j < V; ++j) {
            row[j] *= kept;
            known[j] += row[j] * key;
        }
    }
    if (decayed != nullptr) std::memcpy(decayed, state, sizeof(float) * K * V);
    for (int j = 0; j < V; ++j) error[j] = beta * (v[j] - known[j]);
    for (int i = 0; i < K; ++i) {
        float* row = state + i * V;
        const float key = k[i];
        for (int j = 0; j < V; ++j) row[j] += key * error[j];
    }
}

template <int K, int V>
void forward(const Shape& shape, const float* q, const float* k, const float* v,
             const float* decay, const float* beta, float* out, float* kept) {
    for (int64_t s = 0; s < shape.sequences; ++s) {
        for (int64_t h = 0; h < shape.heads; ++h) {
            alignas(64) float state[K * V] = {};
            float error[V], factor[K];
            for (int64_t t = shape.starts[s]; t < shape.starts[s + 1]; ++t) {
                const int64_t row = t * shape.heads + h;
                if ((t - shape.starts[s]) % SPAN == 0) {
                    // One kept state for each span begun: sequence s may begin one more than its
                    // length / SPAN, so spans are numbered by token / SPAN plus the sequence.
                    const int64_t place = (t / SPAN + s) * shape.heads + h;
                    std::memcpy(kept + place * K * V, state, sizeof(state));
                }
                for (int i = 0; i < K; ++i) factor[i] = exponential(decay[row * K + i]);
                advance<K, V>(state, k + row * K, v + row * V, factor, beta[row], error, nullptr);
                float* to = out + row * V;
                float sum[V] = {};
                for (int i = 0; i < K; ++i) {
                    const float asked = q[row * K + i];
                    for (int j = 0; j < V; ++j) sum[j] += state[i * V + j] * asked;
                }
                for (int j = 0; j < V; ++j) to[j] = sum[j];
            }
        }
    }
}

template <int K, int V>
struct Replay {
    alignas(64) float before[SPAN][K * V];   // state before the decay
    alignas(64) float decayed[SPAN][K * V];  // after it
    alignas(64) float after[SPAN][K * V];    // after the update
    float error[SPAN][V];
    float factor[SPAN][K];
};

// Token t back: `dstate` is the gradient of the state after it, and becomes that of the one before.
template <int K, int V>
inline void retreat(const Replay<K, V>& replay, int64_t at, int64_t row, const float* q,
                    const float* k, const float* v, const float* beta, const float* grad,
                    float* __restrict dstate, float* dq, float* dk, float* dv, float* ddecay,
                    float* dbeta) {
    const float *after = replay.after[at], *decayed = replay.decayed[at];
    const float *before = replay.before[at], *error = replay.error[at];
    const float* from = grad + row * V;
    float derror[V] = {}, dknown[V];
    for (int i = 0; i < K; ++i) {
        const float asked = q[row * K + i], key = k[row * K + i];
        float toward_q = 0.0f, toward_k = 0.0f;
        float* line = dstate + i * V;
        for (int j = 0; j < V; ++j) {
            toward_q += after[i * V + j] * from[j];
            line[j] += asked * from[j];
            derror[j] += key * line[j];
            toward_k += line[j] * error[j];
        }
        dq[row * K + i] = toward_q;
        dk[row * K + i] = toward_k;
    }
    const float step = beta[row];
    float toward_beta = 0.0f;
    for (int j = 0; j < V; ++j) {
        dv[row * V + j] = step * derror[j];
        dknown[j] = -step * derror[j];
    }
    float known[V] = {};
    for (int i = 0; i < K; ++i) {
        const float key = k[row * K + i], factor = replay.factor[at][i];
        float toward_k = 0.0f, toward_decay = 0.0f;
        float* line = dstate + i * V;
        for (int j = 0; j < V; ++j) {
            known[j] += decayed[i * V + j] * key;
            toward_k += decayed[i * V + j] * dknown[j];
            line[j] += key * dknown[j];
            toward_decay += line[j] * before[i * V + j];
            line[j] *= factor;
        }
        dk[row * K + i] += toward_k;
        ddecay[row * K + i] = toward_decay * factor;
    }
    for (int j = 0; j < V; ++j) toward_beta += derror[j] * (v[row * V + j] - known[j]);
    dbeta[row] = toward_beta;
}

template <int K, int V>
void backward(const Shape& shape, const float* q, const float* k, const float* v,
              const float* decay, const float* beta, const float* kept, const float* grad,
              float* dq, float* dk, float* dv, float* ddecay, float* dbeta) {
    std::vector<Replay<K, V>> storage(1);
    Replay<K, V>& replay = storage[0];
    for (int64_t s = 0; s < shape.sequences; ++s) {
        const int64_t begin = shape.starts[s], end = shape.starts[s + 1];
        if (begin == end) continue;
        for (int64_t h = 0; h < shape.heads; ++h) {
            alignas(64) float dstate[K * V] = {};
            alignas(64) float state[K * V];
            for (int64_t first = begin + (end - begin - 1) / SPAN * SPAN; first >= begin;
                 first -= SPAN) {
                const int64_t last = first + SPAN < end ? first + SPAN : end;
                const int64_t place = (first / SPAN + s) * shape.heads + h;
                std::memcpy(state, kept + place * K * V, sizeof(state));
                for (int64_t t = first; t < last; ++t) {
                    const int64_t row = t * shape.heads + h, at = t - first;
                    std::memcpy(replay.before[at], state, sizeof(state));
                    for (int i = 0; i < K; ++i)
                        replay.factor[at][i] = exponential(decay[row * K + i]);
                    advance<K, V>(state, k + row * K, v + row * V, replay.factor[at], beta[row],
                                  replay.error[at], replay.decayed[at]);
                    std::memcpy(replay.after[at], state, sizeof(state));
                }
                for (int64_t t = last - 1; t >= first; --t) {
                    retreat<K, V>(replay, t - first, t * shape.heads + h, q, k, v, beta, grad,
                                  dstate, dq, dk, dv, ddecay, dbeta);
                }
            }
        }
    }
}

}  // namespace

// Heads of 16, 32 or 64 channels, keys and values alike; returns false for others. `kept` has
// room for tokens / 16 + sequences + 1 states of all heads.
EXPORTED bool delta_forward(int64_t sequences, const int64_t* starts, int64_t heads,
                            int64_t channels, const float* q, const float* k, const float* v,
                            const float* decay, const float* beta, float* out, float* kept) {
    const Shape shape{sequences, starts, heads};
    switch (channels) {
        case 16: forward<16, 16>(shape, q, k, v, decay, beta, out, kept); return true;
        case 32: forward<32, 32>(shape, q, k, v, decay, beta, out, kept); return true;
        case 64: forward<64, 64>(shape, q, k, v, decay, beta, out, kept); return true;
        default: return false;
    }
}

EXPORTED bool delta_backward(int64_t sequences, const int64_t* starts, int64_t heads,
                             int64_t channels, const float* q, const float* k, const float* v,
                             const float* decay, const float* beta, const float* kept,
                             const float* grad, float* dq, float* dk, float* dv, float* ddecay,
                             float* dbeta) {
    const Shape shape{sequences, starts, heads};
    switch (channels) {
        case 16:
            backward<16, 16>(shape, q, k, v, decay, beta, kept, grad, dq, dk, dv, ddecay, dbeta);
            return true;
        case 32:
            backward<32, 32>(shape, q, k, v, decay, beta, kept, grad, dq, dk, dv, ddecay, dbeta);
            return true;
        case 64:
            backward<64, 64>(shape, q, k, v, decay, beta, kept, grad, dq, dk, dv, ddecay, dbeta);
            return true;
        default: return false;
    }
}
