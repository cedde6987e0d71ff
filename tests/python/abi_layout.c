/* Prints the layout of every struct of the C ABI as JSON: {"struct": {"sizeof": n, "field":
 * [offset, size], ...}}, and the constants. tests/python compares it with
 * python/flashcore/_core/abi.py.
 */
#include <flashcore/distributed_c.h>
#include <flashcore/flashcore.h>
#include <stdio.h>

#include "bindings/python/fastcall.h"

static int first_struct = 1;

static void begin(const char* name, size_t size) {
  printf("%s\"%s\": {\"sizeof\": %zu", first_struct ? "" : ",\n ", name, size);
  first_struct = 0;
}

#define BEGIN(type) begin(#type, sizeof(type))
#define FIELD(type, field) \
  printf(", \"%s\": [%zu, %zu]", #field, offsetof(type, field), sizeof(((type*)0)->field))
#define END() printf("}")
#define CONSTANT(name) printf(", \"%s\": %d", #name, (int)name)

static void print_tensor(void) {
  BEGIN(flashcore_error);
  FIELD(flashcore_error, code);
  FIELD(flashcore_error, message);
  END();
  BEGIN(flashcore_device);
  FIELD(flashcore_device, device_type);
  FIELD(flashcore_device, device_id);
  END();
  BEGIN(flashcore_dtype);
  FIELD(flashcore_dtype, code);
  FIELD(flashcore_dtype, bits);
  FIELD(flashcore_dtype, lanes);
  END();
  BEGIN(flashcore_tensor);
  FIELD(flashcore_tensor, data);
  FIELD(flashcore_tensor, device);
  FIELD(flashcore_tensor, ndim);
  FIELD(flashcore_tensor, dtype);
  FIELD(flashcore_tensor, shape);
  FIELD(flashcore_tensor, strides);
  FIELD(flashcore_tensor, byte_offset);
  END();
}

static void print_params(void) {
  BEGIN(flashcore_params);
#include "abi_params.inc"
  END();
}

static void print_block_mask(void) {
  BEGIN(flashcore_block_mask_params);
  FIELD(flashcore_block_mask_params, struct_size);
  FIELD(flashcore_block_mask_params, q_len);
  FIELD(flashcore_block_mask_params, kv_len);
  FIELD(flashcore_block_mask_params, block_q);
  FIELD(flashcore_block_mask_params, block_k);
  FIELD(flashcore_block_mask_params, window_left);
  FIELD(flashcore_block_mask_params, window_right);
  FIELD(flashcore_block_mask_params, global_tokens);
  FIELD(flashcore_block_mask_params, values);
  FIELD(flashcore_block_mask_params, columns);
  FIELD(flashcore_block_mask_params, pattern);
  END();
}

static void print_calls(void) {
  print_block_mask();
  BEGIN(flashcore_plan_info);
  FIELD(flashcore_plan_info, struct_size);
  FIELD(flashcore_plan_info, kernel);
  FIELD(flashcore_plan_info, family);
  FIELD(flashcore_plan_info, workspace_bytes);
  FIELD(flashcore_plan_info, work_items);
  FIELD(flashcore_plan_info, tile_q);
  FIELD(flashcore_plan_info, tile_k);
  FIELD(flashcore_plan_info, splits);
  FIELD(flashcore_plan_info, uses_header);
  END();
  BEGIN(flashcore_merge_params);
  FIELD(flashcore_merge_params, struct_size);
  FIELD(flashcore_merge_params, outs);
  FIELD(flashcore_merge_params, lses);
  FIELD(flashcore_merge_params, parts);
  FIELD(flashcore_merge_params, out);
  FIELD(flashcore_merge_params, lse);
  FIELD(flashcore_merge_params, sinks);
  FIELD(flashcore_merge_params, stream);
  FIELD(flashcore_merge_params, cancel);
  END();
  BEGIN(flashcore_backward_params);
  FIELD(flashcore_backward_params, struct_size);
  FIELD(flashcore_backward_params, call);
  FIELD(flashcore_backward_params, dout);
  FIELD(flashcore_backward_params, dlse);
  FIELD(flashcore_backward_params, dq);
  FIELD(flashcore_backward_params, dk);
  FIELD(flashcore_backward_params, dv);
  FIELD(flashcore_backward_params, dbias);
  FIELD(flashcore_backward_params, dsinks);
  FIELD(flashcore_backward_params, global_lse);
  END();
  BEGIN(flashcore_append_params);
  FIELD(flashcore_append_params, struct_size);
  FIELD(flashcore_append_params, k_new);
  FIELD(flashcore_append_params, v_new);
  FIELD(flashcore_append_params, k);
  FIELD(flashcore_append_params, v);
  FIELD(flashcore_append_params, used_k);
  FIELD(flashcore_append_params, block_table);
  FIELD(flashcore_append_params, cu_seqlens_new);
  FIELD(flashcore_append_params, workspace);
  FIELD(flashcore_append_params, workspace_bytes);
  FIELD(flashcore_append_params, stream);
  FIELD(flashcore_append_params, k_scale);
  FIELD(flashcore_append_params, v_scale);
  FIELD(flashcore_append_params, kv_scale_block);
  FIELD(flashcore_append_params, cancel);
  END();
  BEGIN(flashcore_quant_params);
  FIELD(flashcore_quant_params, struct_size);
  FIELD(flashcore_quant_params, from);
  FIELD(flashcore_quant_params, to);
  FIELD(flashcore_quant_params, scale);
  FIELD(flashcore_quant_params, saturated);
  FIELD(flashcore_quant_params, block_rows);
  FIELD(flashcore_quant_params, given_scale);
  FIELD(flashcore_quant_params, rotate);
  FIELD(flashcore_quant_params, workspace);
  FIELD(flashcore_quant_params, workspace_bytes);
  FIELD(flashcore_quant_params, stream);
  FIELD(flashcore_quant_params, cancel);
  END();
  BEGIN(flashcore_python_workspace);
  FIELD(flashcore_python_workspace, address);
  FIELD(flashcore_python_workspace, bytes);
  END();

  BEGIN(flashcore_python_call);
  FIELD(flashcore_python_call, read);
  FIELD(flashcore_python_call, dlpack_name);
  FIELD(flashcore_python_call, empty_like);
  FIELD(flashcore_python_call, params);
  FIELD(flashcore_python_call, cpu_workspace);
  FIELD(flashcore_python_call, error);
  FIELD(flashcore_python_call, interruptible);
  FIELD(flashcore_python_call, swapped);
  FIELD(flashcore_python_call, backward);
  FIELD(flashcore_python_call, count);
  FIELD(flashcore_python_call, fields);
  END();
}

static void print_distributed(void) {
  BEGIN(flashcore_distributed_problem);
  FIELD(flashcore_distributed_problem, struct_size);
  FIELD(flashcore_distributed_problem, ranks);
  FIELD(flashcore_distributed_problem, ranks_per_node);
  FIELD(flashcore_distributed_problem, scheme);
  FIELD(flashcore_distributed_problem, sharding);
  FIELD(flashcore_distributed_problem, head_ranks);
  FIELD(flashcore_distributed_problem, causal);
  FIELD(flashcore_distributed_problem, reproducibility);
  FIELD(flashcore_distributed_problem, dtype);
  FIELD(flashcore_distributed_problem, batch);
  FIELD(flashcore_distributed_problem, q_heads);
  FIELD(flashcore_distributed_problem, kv_heads);
  FIELD(flashcore_distributed_problem, head_dim);
  FIELD(flashcore_distributed_problem, v_dim);
  FIELD(flashcore_distributed_problem, window_left);
  FIELD(flashcore_distributed_problem, window_right);
  FIELD(flashcore_distributed_problem, length);
  FIELD(flashcore_distributed_problem, q_rows);
  FIELD(flashcore_distributed_problem, k_rows);
  FIELD(flashcore_distributed_problem, documents);
  FIELD(flashcore_distributed_problem, documents_count);
  FIELD(flashcore_distributed_problem, link_bandwidth);
  FIELD(flashcore_distributed_problem, link_latency);
  FIELD(flashcore_distributed_problem, net_bandwidth);
  FIELD(flashcore_distributed_problem, net_latency);
  FIELD(flashcore_distributed_problem, forward_flops);
  FIELD(flashcore_distributed_problem, backward_flops);
  FIELD(flashcore_distributed_problem, separate_backward);
  FIELD(flashcore_distributed_problem, by_heads);
  FIELD(flashcore_distributed_problem, memory_bandwidth);
  END();
}

int main(void) {
  printf("{");
  print_tensor();
  print_params();
  print_calls();
  print_distributed();
  CONSTANT(FLASHCORE_OK);
  CONSTANT(FLASHCORE_INVALID_ARGUMENT);
  CONSTANT(FLASHCORE_UNSUPPORTED);
  CONSTANT(FLASHCORE_OUT_OF_MEMORY);
  CONSTANT(FLASHCORE_CUDA_ERROR);
  CONSTANT(FLASHCORE_INTERNAL);
  CONSTANT(FLASHCORE_CANCELLED);
  CONSTANT(FLASHCORE_CPU);
  CONSTANT(FLASHCORE_CUDA);
  CONSTANT(FLASHCORE_WORKSPACE_HEADER_BYTES);
  CONSTANT(FLASHCORE_INT);
  CONSTANT(FLASHCORE_FLOAT);
  CONSTANT(FLASHCORE_BFLOAT);
  CONSTANT(FLASHCORE_BOOL);
  CONSTANT(FLASHCORE_UINT);
  CONSTANT(FLASHCORE_FLOAT8_E4M3);
  CONSTANT(FLASHCORE_FLOAT8_E5M2);
  printf("}\n");
  return 0;
}
