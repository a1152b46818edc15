/* A C program's use of the C API: compiled as C, so the header must be C. Called from
 * c_api_test.cc; gives the line that failed, or 0. */
#include <math.h>
#include <string.h>

#include "fovea/c_api.h"

#define REQUIRE(condition)             \
  do {                                 \
    if (!(condition)) return __LINE__; \
  } while (0)

/* One key: out is v, lse is scale * q . k. */
int c_consumer_forward(void) {
  float q[4] = {1, 2, 3, 4}, k[4] = {0.5f, 0, 0, 1}, v[3] = {7, -8, 9}, out[3], lse[1];
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_plan_options options = FOVEA_PLAN_OPTIONS_INIT;
  fovea_forward_tensors tensors = FOVEA_FORWARD_TENSORS_INIT;
  const int64_t q_sizes[4] = {1, 1, 1, 4}, v_sizes[4] = {1, 1, 1, 3}, lse_sizes[3] = {1, 1, 1};
  fovea_plan* plan = NULL;
  size_t bytes = 12345;
  void* workspace = NULL;

  problem.batch = problem.head_q = problem.head_kv = problem.q_len = problem.kv_len = 1;
  problem.dim_qk = 4;
  problem.dim_v = 3;
  options.backend = "reference";
  options.threads = 1;
  REQUIRE(fovea_plan_create(&problem, &options, &plan) == FOVEA_OK);
  REQUIRE(strcmp(fovea_last_error(), "") == 0);
  REQUIRE(strcmp(fovea_plan_backend(plan), "reference") == 0);
  REQUIRE(strstr(fovea_plan_explain(plan), fovea_plan_kernel(plan)) != NULL);
  REQUIRE(fovea_plan_workspace_bytes(plan, FOVEA_PASS_FORWARD, &bytes) == FOVEA_OK);
  REQUIRE(fovea_host_memory_create(bytes, &workspace) == FOVEA_OK);

  tensors.inputs.q = fovea_tensor_contiguous(q, FOVEA_F32, 4, q_sizes);
  tensors.inputs.k = fovea_tensor_contiguous(k, FOVEA_F32, 4, q_sizes);
  tensors.inputs.v = fovea_tensor_contiguous(v, FOVEA_F32, 4, v_sizes);
  tensors.out = fovea_tensor_contiguous(out, FOVEA_F32, 4, v_sizes);
  tensors.lse = fovea_tensor_contiguous(lse, FOVEA_F32, 3, lse_sizes);
  REQUIRE(fovea_forward(plan, &tensors, workspace, bytes, NULL) == FOVEA_OK);
  REQUIRE(out[0] == 7 && out[1] == -8 && out[2] == 9);
  REQUIRE(fabsf(lse[0] - 2.25f) < 1e-6f);

  tensors.inputs.k.sizes[3] = 5;
  REQUIRE(fovea_forward(plan, &tensors, workspace, bytes, NULL) == FOVEA_INVALID_ARGUMENT);
  REQUIRE(strstr(fovea_last_error(), "forward: k.dim_qk is 5") != NULL);
  fovea_host_memory_destroy(workspace);
  fovea_plan_destroy(plan);
  return 0;
}

int c_consumer_defaults(void) {
  fovea_problem macro = FOVEA_PROBLEM_INIT, call;
  fovea_tensor tensor;
  fovea_plan_options options;
  fovea_forward_tensors forward;
  fovea_backward_tensors backward;
  memset(&call, 0x5a, sizeof(call));
  fovea_problem_init(&call);
  REQUIRE(call.mask_left == FOVEA_UNBOUNDED && call.mask_right == FOVEA_UNBOUNDED);
  REQUIRE(call.mask_prefix == 0 && call.has_scale == 0 && call.dropout == 0);
  REQUIRE(macro.mask_left == call.mask_left && macro.mask_right == call.mask_right);
  REQUIRE(macro.dtype == call.dtype && macro.features == 0 && macro.dim_v == 0);
  fovea_tensor_init(&tensor);
  REQUIRE(tensor.data == NULL && tensor.rank == 0 && tensor.device_type == FOVEA_CPU);
  fovea_plan_options_init(&options);
  REQUIRE(options.backend == NULL && options.threads == 0);
  memset(&forward, 0x5a, sizeof(forward));
  fovea_forward_tensors_init(&forward);
  REQUIRE(forward.inputs.sink.rank == 0 && forward.lse.data == NULL);
  memset(&backward, 0x5a, sizeof(backward));
  fovea_backward_tensors_init(&backward);
  REQUIRE(backward.dsink.rank == 0 && backward.inputs.dropout_offset == 0);
  return 0;
}
