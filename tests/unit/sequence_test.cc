// Where the rows of a batch member lie, and which keys a position sees.
#include "backend/sequence.h"

#include <gtest/gtest.h>

#include "plan/choose.h"

namespace fovea {
namespace {

AttentionProblem dense_problem(int64_t q_len, int64_t kv_len) {
  AttentionProblem p;
  p.batch = 2;
  p.head_q = p.head_kv = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.dim_qk = p.dim_v = 16;
  return p;
}

TEST(SequenceTest, DenseSelectsByBatchStride) {
  const AttentionProblem p = dense_problem(3, 5);
  const Sequence s = sequence_at(p, {}, 1);
  EXPECT_EQ(s.q_len, 3);
  EXPECT_EQ(s.kv_len, 5);
  EXPECT_EQ(s.batch_at, 1);
  EXPECT_EQ(s.q_row, 0);
}

TEST(SequenceTest, KeyLengthStandsInForKvLen) {
  AttentionProblem p = dense_problem(3, 5);
  p.features = Feature::kKeyLengths;
  int32_t lengths[] = {4, -1, 2};
  AttentionInputs t;
  t.key_lengths = TensorView::strided(lengths, DType::kI32, {2}, {2});
  EXPECT_EQ(sequence_at(p, t, 0).kv_len, 4);
  EXPECT_EQ(sequence_at(p, t, 1).kv_len, 2);
}

TEST(SequenceTest, PackedSelectsByRow) {
  AttentionProblem p = dense_problem(4, 6);
  p.layout = Layout::kPacked;
  int32_t cu_q[] = {0, 4, 4}, cu_kv[] = {0, 1, 7};
  AttentionInputs t;
  t.cu_seqlens_q = TensorView::contiguous(cu_q, DType::kI32, {3});
  t.cu_seqlens_kv = TensorView::contiguous(cu_kv, DType::kI32, {3});
  const Sequence s = sequence_at(p, t, 1);
  EXPECT_EQ(s.q_len, 0);
  EXPECT_EQ(s.kv_len, 6);
  EXPECT_EQ(s.q_row, 4);
  EXPECT_EQ(s.kv_row, 1);
  EXPECT_EQ(s.batch_at, 0);
}

TEST(SequenceTest, ScaleDefaultsToTheRootOfDimQk) {
  AttentionProblem p = dense_problem(1, 1);
  EXPECT_DOUBLE_EQ(scale_of(p), 0.25);
  p.scale = -3.0;
  EXPECT_DOUBLE_EQ(scale_of(p), -3.0);
}

// window_keys and position_sees state the same rule twice; they must agree on every pair.
TEST(VisibilityTest, RangeAgreesWithPredicate) {
  for (int64_t left = -1; left < 5; ++left) {
    for (int64_t right = -1; right < 5; ++right) {
      const Mask mask = Mask::window(left, right);
      for (int64_t position = -4; position < 9; ++position) {
        const KeyRange range = window_keys(mask, position, 7);
        for (int64_t key = 0; key < 7; ++key) {
          EXPECT_EQ(position_sees(mask, position, key), key >= range.begin && key < range.end)
              << left << " " << right << " " << position << " " << key;
        }
      }
    }
  }
}

TEST(VisibilityTest, PrefixIsSeenByAll) {
  const Mask mask = Mask::causal().with_prefix(3);
  EXPECT_TRUE(position_sees(mask, -2, 2));
  EXPECT_FALSE(position_sees(mask, -2, 3));
  EXPECT_TRUE(position_sees(mask, 4, 4));
}

// Tightening a mask must not change which keys any query of any legal sequence sees.
TEST(VisibilityTest, TightMaskSeesTheSame) {
  for (int64_t q_len : {0, 1, 3}) {
    for (int64_t kv_len : {0, 1, 4}) {
      for (int64_t left = -1; left < 6; ++left) {
        for (int64_t right = -1; right < 6; ++right) {
          AttentionProblem p = dense_problem(q_len, kv_len);
          p.mask = Mask::window(left, right).with_prefix((left + right + 2) % 3);
          const Mask tight = with_tight_mask(p).mask;
          for (int64_t q = 0; q <= q_len; ++q) {
            for (int64_t kv = 0; kv <= kv_len; ++kv) {
              for (int64_t i = 0; i < q; ++i) {
                for (int64_t j = 0; j < kv; ++j) {
                  EXPECT_EQ(position_sees(p.mask, i + kv - q, j),
                            position_sees(tight, i + kv - q, j));
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(VisibilityTest, TightMaskBoundsEveryReach) {
  AttentionProblem p = dense_problem(4, 9);
  const int64_t huge = std::numeric_limits<int64_t>::max();
  p.mask = Mask::window(huge, 1).with_prefix(huge);
  EXPECT_EQ(with_tight_mask(p).mask, (Mask{Mask::kUnbounded, 1, 9}));
  p.mask = Mask::window(2, huge);
  EXPECT_EQ(with_tight_mask(p).mask, Mask::window(2, Mask::kUnbounded));
  p.q_len = 1;
  p.mask = Mask::causal();
  EXPECT_EQ(with_tight_mask(p).mask, Mask::none());
}

}  // namespace
}  // namespace fovea
