/* Causal attention from C: plan once, own the workspace, run. */
#include <fovea/c_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { kRows = 128, kHeads = 8, kDim = 64, kElements = kRows * kHeads * kDim };

int main(void) {
  static float q[kElements], k[kElements], v[kElements], out[kElements];
  const int64_t shape[4] = {1, kRows, kHeads, kDim};
  int failed = 1;
  for (int i = 0; i < kElements; ++i) {
    q[i] = 0.1f;
    k[i] = 0.2f;
    v[i] = 1.0f;
  }

  fovea_problem problem = FOVEA_PROBLEM_INIT;
  problem.batch = 1;
  problem.head_q = problem.head_kv = kHeads;
  problem.q_len = problem.kv_len = kRows;
  problem.dim_qk = problem.dim_v = kDim;
  problem.mask_right = 0; /* causal */

  fovea_forward_tensors tensors = FOVEA_FORWARD_TENSORS_INIT;
  tensors.inputs.q = fovea_tensor_contiguous(q, FOVEA_F32, 4, shape);
  tensors.inputs.k = fovea_tensor_contiguous(k, FOVEA_F32, 4, shape);
  tensors.inputs.v = fovea_tensor_contiguous(v, FOVEA_F32, 4, shape);
  tensors.out = fovea_tensor_contiguous(out, FOVEA_F32, 4, shape);

  fovea_plan* plan = NULL;
  void* workspace = NULL;
  size_t bytes = 0;
  if (fovea_plan_create(&problem, NULL, &plan) == FOVEA_OK &&
      fovea_plan_workspace_bytes(plan, FOVEA_PASS_FORWARD, &bytes) == FOVEA_OK) {
    if (fovea_host_memory_create(bytes, &workspace) == FOVEA_OK &&
        fovea_forward(plan, &tensors, workspace, bytes, NULL) == FOVEA_OK) {
      printf("fovea %s, %s: out[0] = %g\n", fovea_version(), fovea_plan_kernel(plan), out[0]);
      failed = 0;
    }
  }
  if (failed) fprintf(stderr, "%s\n", fovea_last_error());
  fovea_host_memory_destroy(workspace);
  fovea_plan_destroy(plan);
  return failed;
}
