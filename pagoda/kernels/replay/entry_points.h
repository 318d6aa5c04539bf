// The ops' entry points that a layer program calls; each is defined and described in its op's cpu.cpp.
#pragma once

#include "../linear/gemm.h"
#include "parallel.h"

PAGODA_EXPORT void pagoda_embedding(int dtype, const int32_t* token_ids, const void* table, void* out, int64_t tokens,
                                    int64_t hidden, float scale, int threads);
PAGODA_EXPORT void pagoda_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* out,
                                   void* sum_out, int64_t outer, int64_t inner, int64_t outer_stride,
                                   int64_t inner_stride, int64_t dim, float eps, int unit_offset, int threads);
PAGODA_EXPORT void pagoda_rotary(int dtype, const void* x, void* out, const int32_t* positions, const float* cos,
                                 const float* sin, int64_t tokens, int64_t heads, int64_t head_dim,
                                 int64_t token_stride, int threads);
PAGODA_EXPORT void pagoda_write_kv(int dtype, int stored, const void* k, const void* v, void* k_pages, void* v_pages,
                                   float* k_scale, float* v_scale, const int64_t* slot_mapping, int64_t tokens,
                                   int64_t kv_heads, int64_t head_dim, int64_t k_stride, int64_t v_stride,
                                   int64_t block_size, const int32_t* positions, const float* cos, const float* sin,
                                   int threads);
PAGODA_EXPORT void pagoda_attention(int dtype, int stored, const void* q, void* out, const void* k_pages,
                                    const void* v_pages, const float* k_scale, const float* v_scale,
                                    const int32_t* query_start, const int32_t* seq_lens, const int32_t* block_table,
                                    int64_t table_stride, int64_t q_stride, int num_tokens, int num_rows,
                                    int num_heads, int num_kv_heads, int head_dim, int block_size, float scale,
                                    int window, float softcap, int threads);
PAGODA_EXPORT void pagoda_silu_mul(int dtype, const void* gate_up, void* out, int64_t tokens, int64_t width,
                                   int threads);
PAGODA_EXPORT void pagoda_gelu_tanh_mul(int dtype, const void* gate_up, void* out, int64_t tokens, int64_t width,
                                        int threads);
PAGODA_EXPORT void pagoda_softcap(int dtype, const void* x, void* out, int64_t elements, float limit, int threads);
