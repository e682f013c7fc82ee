// Sizes and offsets as this machine's C compiler lays them out; tests/abi.rs compares them with the Rust bindings.
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#define SIZE(t) { #t, "", sizeof(struct t) }
#define FIELD(t, f) { #t, #f, offsetof(struct t, f) }

struct dllm_abi_row { const char * type; const char * field; uint64_t value; };

static const struct dllm_abi_row rows[] = {
    SIZE(ggml_tensor), FIELD(ggml_tensor, type), FIELD(ggml_tensor, buffer), FIELD(ggml_tensor, ne), FIELD(ggml_tensor, nb),
    FIELD(ggml_tensor, op), FIELD(ggml_tensor, op_params), FIELD(ggml_tensor, flags), FIELD(ggml_tensor, src),
    FIELD(ggml_tensor, view_src), FIELD(ggml_tensor, view_offs), FIELD(ggml_tensor, data), FIELD(ggml_tensor, name),
    FIELD(ggml_tensor, extra),
    SIZE(ggml_init_params), FIELD(ggml_init_params, mem_buffer), FIELD(ggml_init_params, no_alloc),
    SIZE(ggml_type_traits), FIELD(ggml_type_traits, blck_size), FIELD(ggml_type_traits, type_size),
    FIELD(ggml_type_traits, to_float),
    SIZE(ggml_backend_dev_props), FIELD(ggml_backend_dev_props, memory_free), FIELD(ggml_backend_dev_props, caps),
    SIZE(ggml_backend_dev_caps),
    SIZE(ggml_threadpool_params), FIELD(ggml_threadpool_params, n_threads), FIELD(ggml_threadpool_params, poll),
    SIZE(llama_model_params), FIELD(llama_model_params, n_gpu_layers), FIELD(llama_model_params, kv_overrides),
    FIELD(llama_model_params, vocab_only), FIELD(llama_model_params, check_tensors),
    SIZE(llama_model_kv_override), FIELD(llama_model_kv_override, key), FIELD(llama_model_kv_override, val_str),
};

const struct dllm_abi_row * dllm_abi_table(size_t * n) {
    *n = sizeof(rows) / sizeof(rows[0]);
    return rows;
}
