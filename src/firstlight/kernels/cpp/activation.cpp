// Owns gated activations of whole arrays. It refuses to know Python and torch.
#include "activation.hpp"

#include <algorithm>

#include "threads.hpp"

namespace firstlight {

void activate(const float* gate, const float* up, float* out, std::int64_t count,
              const GatedActivation& activation, int threads) {
  constexpr std::int64_t kNumbersAtOnce = 8 << 10;
  each_piece(threads, count, kNumbersAtOnce, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += 16) {
      const std::int64_t left = std::min<std::int64_t>(16, end - i);
      const auto mask = static_cast<__mmask16>((1u << left) - 1);
      const __m512 value = activate_512(_mm512_maskz_loadu_ps(mask, gate + i),
                                        _mm512_maskz_loadu_ps(mask, up + i), activation);
      _mm512_mask_storeu_ps(out + i, mask, value);
    }
  });
}

}  // namespace firstlight
