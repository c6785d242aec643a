// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Checks how attention calls are cut into blocks, over random shapes. tests/test_cuda_attention_plan.py compiles and
// runs it; the exit status is the number of failures.
#include "cuda/attention_plan.h"

#include <cstdio>
#include <random>
#include <vector>

using namespace kvspeed::cuda;

namespace {

int failures = 0;
void expect(bool good, const char* what) {
  if (good) return;
  ++failures;
  std::printf("FAIL %s\n", what);
}

std::mt19937_64 random_bits(std::random_device{}());
int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_bits); }

AttentionPlan plan_of(const AttentionWork& work, const std::vector<TokenRange>& ranges) {
  return plan_attention(
      work, [&](int64_t i) { return ranges[static_cast<size_t>(i)]; }, static_cast<int64_t>(ranges.size()));
}
AttentionPlan plan_of(const AttentionWork& work, const std::vector<int64_t>& lengths) {
  std::vector<TokenRange> ranges;
  for (const int64_t n : lengths) ranges.push_back({0, n});
  return plan_of(work, ranges);
}

constexpr int64_t kKiB = 1024, kH200 = 228 * kKiB;  // shared memory of a multiprocessor

// Splits cover the tokens: no more of them than the kernels will find work for, and none short.
void check_cover(const AttentionPlan& plan, const std::vector<TokenRange>& ranges) {
  int64_t units = 0, pieces = 0;
  for (const TokenRange& range : ranges) {
    if (range.from >= range.to) continue;
    units += divide_up(range.to, plan.unit_tokens) - range.from / plan.unit_tokens;
    pieces += divide_up(range.to, plan.split_units) - range.from / plan.split_units;
  }
  expect(plan.splits >= 1 && plan.split_units >= 1, "at least one split, of at least one unit");
  if (plan.decode) {
    expect(plan.splits == 1 || plan.splits == pieces, "decode: a split for each piece of a segment");
  } else {
    expect(plan.splits * plan.split_units >= units, "prefill: the splits hold all tiles");
    expect(plan.splits == 1 || (plan.splits - 1) * plan.split_units < units, "prefill: no split is empty");
  }
}

void check_random() {
  const int64_t dims[] = {64, 80, 96, 128, 256}, sms[] = {1, 4, 46, 108, 132, 188};
  for (int i = 0; i < 20000; ++i) {
    std::vector<TokenRange> lengths(static_cast<size_t>(draw(1, 40)));
    const int64_t longest = int64_t{1} << draw(0, 18);
    for (TokenRange& range : lengths) {
      range = {draw(0, 1) ? 0 : draw(0, longest), draw(0, 4) == 0 ? 0 : draw(1, longest)};
    }
    AttentionWork work = {draw(1, draw(0, 1) ? 16 : 5000), draw(1, 300), dims[draw(0, 4)], 0, sms[draw(0, 5)], kH200};
    const AttentionPlan chosen = plan_of(work, lengths);
    check_cover(chosen, lengths);
    expect(chosen.decode == (work.rows <= kMaxDecodeRows), "few rows go to decode, more to prefill");

    work.split_tokens = draw(1, 3000);
    const AttentionPlan given = plan_of(work, lengths);
    check_cover(given, lengths);
    if (given.decode && given.splits > 1) expect(given.split_units == work.split_tokens, "the caller's split is kept");
    work.batch_heads = draw(1, 300), work.sm_count = draw(1, 200);
    const AttentionPlan again = plan_of(work, lengths);
    expect(given.splits == again.splits && given.split_units == again.split_units,
           "with a given split, batch and device change nothing");
  }
}

// The shapes that matter: enough blocks to fill the device, not so many that states cost as much as keys.
void check_known() {
  const AttentionPlan nothing = plan_of({4, 8, 128, 0, 132, kH200}, {0, 0});
  expect(nothing.splits == 1, "no tokens are still one state");
  expect(plan_of({4, 8, 128, 0, 132, kH200}, {1, 200}).splits == 1, "a short context is one kernel");
  const AttentionPlan long_one = plan_of({4, 8, 128, 0, 132, kH200}, {131072, 1});
  expect(long_one.splits * 8 >= 132 && long_one.split_units >= 512, "a long context fills the device");
  expect(plan_of({4, 8 * 64, 128, 0, 132, kH200}, {4096, 5}).splits <= 4, "a big batch needs few splits");
  expect(plan_of({4096 * 4, 8, 128, 0, 132, kH200}, {0, 4096}).splits == 1,
         "a long prompt fills the device without splits");
  const AttentionPlan question = plan_of({64 * 4, 8, 128, 0, 132, kH200}, {32768, 64});
  expect(question.splits > 4 && question.splits <= 16, "a question over a long context is split");
  expect(plan_of({4, 8, 128, 1, 132, kH200}, {5, 3}).splits == 8, "splits of one token");
}

// What no row can see is not planned for: everything else is, whatever length the tail has.
void check_window() {
  for (int i = 0; i < 3000; ++i) {
    const int64_t window = draw(1, 40), tail_position = draw(0, 60), longest = draw(1, 20), rows = draw(1, longest);
    const int64_t shortest = draw(0, 1) ? longest : 0, position = draw(0, 80), tokens = draw(0, 50);
    const TokenRange range = reached(window_reach(window, tail_position, shortest, longest, rows), position, tokens);
    expect(range.from >= 0 && range.to <= tokens, "a range lies in its segment");
    int64_t first = tokens, last = -1;  // that any row sees, by looking at all
    for (int64_t tail = shortest; tail <= longest; ++tail) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = tail_position + tail - rows + row;
        for (int64_t t = 0; t < tokens; ++t) {
          if (position + t <= at && position + t > at - window)
            first = t < first ? t : first, last = t > last ? t : last;
        }
      }
    }
    expect(last < 0 ? range.from >= range.to : range.from == first && range.to == last + 1, "just what is seen");
  }
  const auto windowed = [](int64_t window) {
    const Reach reach = window_reach(window, 131072, 1, 1, 1);
    return plan_of({4, 8, 128, 0, 132, kH200}, {reached(reach, 0, 131072), reached(reach, 131072, 1)});
  };
  expect(windowed(0).split_units >= 512, "without a window all is planned");
  expect(windowed(4096).splits * windowed(4096).split_units < 4096 + 3 * windowed(4096).split_units,
         "a window over a long context is all that is read");
  expect(windowed(128).splits == 1, "a short window is one kernel");
}

// 128 rows a block only where two such blocks fit.
void check_wide() {
  const std::vector<int64_t> prompt = {0, 4096};
  expect(plan_of({4096 * 4, 8, 128, 0, 108, 164 * kKiB}, prompt).wide, "an A100 has room for two");
  expect(plan_of({4096 * 4, 8, 128, 0, 132, kH200}, prompt).wide, "so has an H200");
  expect(!plan_of({4096 * 4, 8, 128, 0, 84, 100 * kKiB}, prompt).wide, "100 KiB hold one only");
  expect(plan_of({4096 * 4, 8, 64, 0, 84, 100 * kKiB}, prompt).wide, "but two of head size 64");
  expect(!plan_of({4096 * 4, 8, 256, 0, 132, kH200}, prompt).wide, "there is no such kernel for 256");
  expect(!plan_of({64, 8, 128, 0, 132, kH200}, prompt).wide, "64 rows are one small block");
  expect(!plan_of({256, 8, 128, 4096, 132, kH200}, prompt).wide, "too few blocks to halve their number");
}

void check_divider() {
  for (int i = 0; i < 200000; ++i) {
    const int64_t d = i < 300 ? i + 1 : draw(1, int64_t{1} << draw(1, 30)), n = i % 7 ? draw(0, INT32_MAX) : INT32_MAX;
    const Divider by = divider(d);
    expect(static_cast<int64_t>(static_cast<uint64_t>(n) * by.magic >> by.shift) == n / d, "division by a page size");
    const int64_t edge = n / d * d;
    expect(static_cast<int64_t>(static_cast<uint64_t>(edge) * by.magic >> by.shift) == n / d, "division of a multiple");
  }
}

}  // namespace

int main() {
  check_random();
  check_known();
  check_window();
  check_wide();
  check_divider();
  return failures > 100 ? 100 : failures;
}
