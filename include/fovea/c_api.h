/* The same library for C and for other languages: plain structs, an opaque plan, status codes.
 *
 *   fovea_problem problem = FOVEA_PROBLEM_INIT;
 *   problem.batch = 1; problem.head_q = problem.head_kv = 8; problem.q_len = problem.kv_len = 128;
 *   problem.dim_qk = problem.dim_v = 64; problem.mask_right = 0;                     // causal
 *   fovea_plan* plan = NULL;
 *   if (fovea_plan_create(&problem, NULL, &plan) != FOVEA_OK) return puts(fovea_last_error());
 *   fovea_forward_tensors t = FOVEA_FORWARD_TENSORS_INIT;
 *   t.inputs.q = fovea_tensor_contiguous(q, FOVEA_F32, 4, (int64_t[]){1, 128, 8, 64});  // k ...
 *   fovea_status done = fovea_forward(plan, &t, workspace, workspace_bytes, NULL);
 *   fovea_plan_destroy(plan);
 *
 * Shapes, features and rules are those of fovea/attention.h and fovea/plan.h. A tensor struct of
 * zeros is "not given". No call throws, aborts or prints. A plan may be used by many threads at
 * once. */
#ifndef FOVEA_C_API_H_
#define FOVEA_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the request itself is wrong */
  FOVEA_UNSUPPORTED = 2,      /* the request is right, but no engine here can do it */
  FOVEA_OUT_OF_MEMORY = 3,
  FOVEA_INTERNAL = 4
} fovea_status;

/* Why this thread's last call that gives a status was refused; "" when it gave FOVEA_OK. Valid
 * until the next such call on this thread. */
const char* fovea_last_error(void);

const char* fovea_version(void); /* "0.1.0" */

/* Values of the int32_t fields below. */
enum { FOVEA_F32 = 0, FOVEA_F16 = 1, FOVEA_BF16 = 2, FOVEA_F64 = 3, FOVEA_BOOL = 4, FOVEA_I32 = 5 };
enum { FOVEA_CPU = 1, FOVEA_CUDA = 2 };
enum { FOVEA_LAYOUT_DENSE = 0, FOVEA_LAYOUT_PACKED = 1 };
enum {
  FOVEA_FEATURE_BIAS = 1,
  FOVEA_FEATURE_BOOL_MASK = 2,
  FOVEA_FEATURE_KEY_LENGTHS = 4,
  FOVEA_FEATURE_ALIBI = 8,
  FOVEA_FEATURE_SINK = 16
};
enum { FOVEA_PASS_FORWARD = 0, FOVEA_PASS_BACKWARD = 1 };
enum { FOVEA_UNBOUNDED = -1 };
enum { FOVEA_MAX_RANK = 4 };

typedef struct fovea_tensor {
  void* data;
  int32_t dtype;       /* FOVEA_F32 ... */
  int32_t device_type; /* FOVEA_CPU or FOVEA_CUDA; 0 is FOVEA_CPU */
  int32_t device_index;
  int32_t rank;
  int64_t sizes[FOVEA_MAX_RANK];
  int64_t strides[FOVEA_MAX_RANK]; /* in elements */
} fovea_tensor;

/* A dense tensor on the CPU. A rank outside 0..FOVEA_MAX_RANK gives a tensor that every call
 * refuses. */
fovea_tensor fovea_tensor_contiguous(void* data, int32_t dtype, int32_t rank, const int64_t* sizes);

typedef struct fovea_problem {
  int64_t batch, head_q, head_kv, q_len, kv_len, dim_qk, dim_v;
  int64_t total_q, total_kv; /* packed layout only */
  int64_t mask_left, mask_right, mask_prefix;
  int32_t dtype;
  int32_t layout;
  uint32_t features;     /* FOVEA_FEATURE_... combined with | */
  int32_t deterministic; /* 1: two runs give the same bits */
  int32_t allow_tf32;    /* 1: allowed for f32 problems on tensor cores */
  int32_t has_scale;     /* 0: scale is ignored and 1 / sqrt(dim_qk) stands */
  int32_t has_logit_bound;
  double scale;
  double softcap; /* 0 is off */
  double dropout;
  double logit_bound;
} fovea_problem;

typedef struct fovea_plan_options {
  const char* backend; /* NULL or "": the best that takes the problem */
  int32_t threads;     /* 0: FOVEA_NUM_THREADS, or all cores this process may use */
  int32_t device_type; /* 0 is FOVEA_CPU */
  int32_t device_index;
  int32_t running_max; /* 1: softmax always refers to the largest score so far; Hopper engine */
} fovea_plan_options;

typedef struct fovea_attention_inputs {
  fovea_tensor q, k, v;
  fovea_tensor bias, mask, key_lengths, alibi_slopes, sink;
  fovea_tensor cu_seqlens_q, cu_seqlens_kv;
  uint64_t dropout_seed, dropout_offset;
} fovea_attention_inputs;

typedef struct fovea_forward_tensors {
  fovea_attention_inputs inputs;
  fovea_tensor out;
  fovea_tensor lse; /* optional */
} fovea_forward_tensors;

typedef struct fovea_backward_tensors {
  fovea_attention_inputs inputs;
  fovea_tensor out, lse, dout;
  fovea_tensor dlse; /* optional */
  fovea_tensor dq, dk, dv;
  fovea_tensor dbias, dsink; /* optional */
} fovea_backward_tensors;

typedef struct fovea_partial_result {
  fovea_tensor out, lse;
} fovea_partial_result;

/* Defaults: no mask, f32, dense, no feature. Sizes have none: they must be set. */
/* clang-format off */
#define FOVEA_PROBLEM_INIT \
  {0, 0, 0, 0, 0, 0, 0, 0, 0, FOVEA_UNBOUNDED, FOVEA_UNBOUNDED, 0, FOVEA_F32, FOVEA_LAYOUT_DENSE, \
   0u, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0}
#define FOVEA_PLAN_OPTIONS_INIT {NULL, 0, FOVEA_CPU, 0, 0}
#define FOVEA_TENSOR_INIT {NULL, FOVEA_F32, FOVEA_CPU, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0}}
#define FOVEA_ATTENTION_INPUTS_INIT \
  {FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, \
   FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, \
   0u, 0u}
#define FOVEA_FORWARD_TENSORS_INIT \
  {FOVEA_ATTENTION_INPUTS_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT}
#define FOVEA_BACKWARD_TENSORS_INIT \
  {FOVEA_ATTENTION_INPUTS_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, \
   FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT, \
   FOVEA_TENSOR_INIT, FOVEA_TENSOR_INIT}
/* clang-format on */

/* The same defaults for languages without C's macros; a null pointer is ignored. */
void fovea_problem_init(fovea_problem* problem);
void fovea_plan_options_init(fovea_plan_options* options);
void fovea_tensor_init(fovea_tensor* tensor);
void fovea_forward_tensors_init(fovea_forward_tensors* tensors);
void fovea_backward_tensors_init(fovea_backward_tensors* tensors);

typedef struct fovea_plan fovea_plan;

/* options may be NULL. *plan is NULL unless the call gives FOVEA_OK; free it with
 * fovea_plan_destroy, which takes NULL too. */
fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_plan_options* options,
                               fovea_plan** plan);
void fovea_plan_destroy(fovea_plan* plan);

/* Texts live as long as the plan; NULL for a null plan. */
const char* fovea_plan_backend(const fovea_plan* plan);
const char* fovea_plan_kernel(const fovea_plan* plan);
const char* fovea_plan_explain(const fovea_plan* plan);

/* Bytes of scratch for FOVEA_PASS_FORWARD or FOVEA_PASS_BACKWARD. */
fovea_status fovea_plan_workspace_bytes(const fovea_plan* plan, int32_t pass, size_t* bytes);

/* Memory of the host that suits a workspace of the CPU: on large pages where the system has them.
 * *memory is NULL unless the call gives FOVEA_OK and bytes is above 0; free it with
 * fovea_host_memory_destroy, which takes NULL too. Any memory aligned to 64 bytes will do. */
fovea_status fovea_host_memory_create(size_t bytes, void** memory);
void fovea_host_memory_destroy(void* memory);

/* workspace is aligned to 64 bytes. stream is a cudaStream_t; the CPU ignores it. */
fovea_status fovea_forward(const fovea_plan* plan, const fovea_forward_tensors* tensors,
                           void* workspace, size_t workspace_bytes, void* stream);
fovea_status fovea_backward(const fovea_plan* plan, const fovea_backward_tensors* tensors,
                            void* workspace, size_t workspace_bytes, void* stream);

/* Joins count partial results over disjoint keys; out and lse may be one of the parts'. All are on
 * out's device. */
fovea_status fovea_merge(const fovea_partial_result* parts, int64_t count, const fovea_tensor* out,
                         const fovea_tensor* lse, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* FOVEA_C_API_H_ */
