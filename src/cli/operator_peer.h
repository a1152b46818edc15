// The operator's cases in torch's words.
#pragma once

#include "cli/peer.h"
#include "harness/case.h"
#include "harness/tensors.h"

namespace fovea::cli {

// Fails where scaled_dot_product_attention has no words for the case. The tensors must outlive the
// contenders that are opened on it.
Status load_operator(TorchPeer& torch, const harness::Case& c, harness::CaseTensors& tensors,
                     TorchPeer::Inputs inputs);

}  // namespace fovea::cli
