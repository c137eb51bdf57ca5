// Owns how tokens are gathered by expert, cut into jobs and spread over threads.
// It refuses to know how weights are decoded and multiplied.
//
// A wave of jobs goes through three steps, each on all threads: inputs are prepared, inner
// activations computed, and outputs added. In the last step a thread owns rows of w2 for all jobs of
// the wave, so no two threads add to one number, and a token's experts are summed in their order.
#include "experts.hpp"

#include <algorithm>

#include "threads.hpp"

namespace firstlight {
namespace {

constexpr std::int64_t kVectorTokens = 4;     // of one expert; for more, tiles are faster
constexpr std::int64_t kMostTokens = 128;     // of one job
constexpr std::int64_t kWaveBytes = 4 << 20;  // of prepared inputs and inner activations
constexpr std::int64_t kRowsAtOnce = 128;     // claimed by a thread

// Tokens and shares, those of one expert together, in the order of the batch.
struct Gathered {
  std::vector<std::int64_t> begins, tokens;
  std::vector<float> shares;

  explicit Gathered(const ExpertsCall& call) : begins(call.experts + 1) {
    const std::int64_t places = call.tokens * call.chosen;
    const auto at_hand = [&](std::int64_t place) {
      return call.slot_of(call.ids[place]) < 0 ? -1 : call.ids[place] - call.first;
    };
    for (std::int64_t i = 0; i < places; ++i) {
      if (at_hand(i) >= 0) ++begins[at_hand(i) + 1];
    }
    for (std::size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    tokens.resize(begins.back());
    shares.resize(begins.back());
    std::vector<std::int64_t> next(begins.begin(), begins.end() - 1);
    for (std::int64_t i = 0; i < places; ++i) {
      if (at_hand(i) < 0) continue;
      const std::int64_t target = next[at_hand(i)]++;
      tokens[target] = i / call.chosen;
      shares[target] = call.shares[i];
    }
  }
};

std::vector<ExpertJob> jobs_of(const ExpertsCall& call, const Gathered& gathered) {
  std::vector<ExpertJob> jobs;
  for (std::int64_t expert = 0; expert < call.experts; ++expert) {
    const std::int64_t end = gathered.begins[expert + 1];
    for (std::int64_t at = gathered.begins[expert]; at < end; at += kMostTokens) {
      ExpertJob job;
      job.expert = call.slot_of(call.first + expert);
      job.count = std::min(kMostTokens, end - at);
      job.tokens = gathered.tokens.data() + at;
      job.shares = gathered.shares.data() + at;
      job.tiled = call.tiles && job.count > kVectorTokens;
      jobs.push_back(job);
    }
  }
  return jobs;
}

const ExpertKernels& kernels_of(const ExpertJob& job) {
  return job.tiled ? kTileExperts : kVectorExperts;
}

std::int64_t x_bytes(const ExpertsCall& call, const ExpertJob& job) {
  return kernels_of(job).prepared_bytes(job.count, call.inputs());
}

std::int64_t bytes_of(const ExpertsCall& call, const ExpertJob& job) {
  return x_bytes(call, job) + kernels_of(job).prepared_bytes(job.count, call.inner());
}

void run_wave(const ExpertsCall& call, const ExpertJob* jobs, std::int64_t count) {
  each_piece(call.threads, count, 1, [&](std::int64_t index, std::int64_t) {
    kernels_of(jobs[index]).prepare(call, jobs[index]);
  });
  const std::int64_t pieces = (call.inner() + kRowsAtOnce - 1) / kRowsAtOnce;
  each_piece(call.threads, count * pieces, 1, [&](std::int64_t piece, std::int64_t) {
    const ExpertJob& job = jobs[piece / pieces];
    const std::int64_t row = piece % pieces * kRowsAtOnce;
    kernels_of(job).inner(call, job, row, std::min(kRowsAtOnce, call.inner() - row));
  });
  each_piece(call.threads, call.inputs(), kRowsAtOnce, [&](std::int64_t row, std::int64_t end) {
    for (std::int64_t i = 0; i < count; ++i) {
      kernels_of(jobs[i]).outer(call, jobs[i], row, end - row);
    }
  });
}

}  // namespace

void experts_mxfp4(const ExpertsCall& call) {
  const std::int64_t values = call.tokens * call.inputs();
  if (call.total == nullptr) {
    std::fill(call.out, call.out + values, 0.0f);
  } else {
    std::copy(call.total, call.total + values, call.out);
  }
  const Gathered gathered(call);
  std::vector<ExpertJob> jobs = jobs_of(call, gathered);
  for (std::size_t begin = 0, end = 0; begin < jobs.size(); begin = end) {
    std::int64_t bytes = 0;
    while (end < jobs.size() && (end == begin || bytes + bytes_of(call, jobs[end]) <= kWaveBytes)) {
      bytes += bytes_of(call, jobs[end++]);
    }
    auto* at = static_cast<std::uint8_t*>(thread_scratch(2, bytes));
    for (std::size_t i = begin; i < end; ++i) {
      jobs[i].x = at;
      jobs[i].inner = at + x_bytes(call, jobs[i]);
      at += bytes_of(call, jobs[i]);
    }
    run_wave(call, jobs.data() + begin, static_cast<std::int64_t>(end - begin));
  }
}

}  // namespace firstlight
