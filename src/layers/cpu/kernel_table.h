// The kernels of one dtype, as a table.
#pragma once

#include "layers/cpu/couple.h"
#include "layers/cpu/depthwise.h"
#include "layers/cpu/kernels.h"
#include "layers/cpu/norm.h"
#include "layers/cpu/rotate.h"
#include "layers/cpu/rows.h"

namespace fovea::FOVEA_ISA {

// G: products. S: what sums over rows are made in.
template <typename T, typename G, typename S>
constexpr layers::cpu::Kernels kTable = {
    .shared_scratch = G::kSharedScratch,
    .worker_scratch = G::kWorkerScratch,
    .gemm = G::run,
    .rotate = rotate_rows<T>,
    .normalise = normalise_rows<T>,
    .normalise_backward = normalise_rows_backward<T, S>,
    .column_sums = column_sums<T, S>,
    .store_sums = store_sums<T>,
    .copy = copy_rows<T>,
    .sum_heads = sum_heads<T>,
    .depthwise = depthwise_rows<T>,
    .depthwise_sums = depthwise_sums<T, S>,
    .couple = Couple<T>::forward,
    .couple_backward = Couple<T>::template backward<S>,
    .fill_rotation = fill_rotation<T>,
};

}  // namespace fovea::FOVEA_ISA
