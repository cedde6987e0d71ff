/* Functions that misbehave. The verifier must still write its report. */
#include <flashcore/verify_c.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int32_t attention(const flashcore_verify_call* call, void* user); /* examples/verify_me.c */
int32_t attention_backward(const flashcore_verify_backward_call* call, void* user);

int32_t crashes(const flashcore_verify_call* call, void* user) {
  if (call->k->shape[2] >= 65) raise(SIGSEGV);
  return attention(call, user);
}

int32_t hangs(const flashcore_verify_call* call, void* user) {
  for (volatile int64_t n = call->k->shape[2]; n >= 65;) {
  }
  return attention(call, user);
}

int32_t exits(const flashcore_verify_call* call, void* user) {
  if (call->causal) exit(3);
  return attention(call, user);
}

int32_t aborts(const flashcore_verify_call* call, void* user) {
  if (call->k->shape[2] >= 65) abort();
  return attention(call, user);
}

static int32_t recurse(int depth) {
  volatile char room[4096];
  room[depth % 4096] = (char)depth;
  return depth > 1 << 30 ? 0 : recurse(depth + 1) + room[0];
}

int32_t overflows_its_stack(const flashcore_verify_call* call, void* user) {
  if (call->k->shape[2] >= 65) return recurse(1);
  return attention(call, user);
}

/* Correct, but writes to standard output and reads standard input. */
int32_t talks(const flashcore_verify_call* call, void* user) {
  char line[16];
  printf("{\"ok\": false} garbage\n");
  fflush(stdout);
  if (fgets(line, sizeof line, stdin) != NULL) return 1;
  return attention(call, user);
}

/* Closes the reply pipe, the shared memory and all other descriptors. */
int32_t closes_everything(const flashcore_verify_call* call, void* user) {
  if (call->k->shape[2] >= 65) {
    for (int fd = 3; fd < 64; ++fd) close(fd);
  }
  return attention(call, user);
}

int32_t zeroes_its_inputs(const flashcore_verify_call* call, void* user) {
  const int32_t code = attention(call, user);
  memset(call->v->data, 0, 4);
  return code;
}

/* Writes far outside of the guard bands. */
int32_t writes_far_away(const flashcore_verify_call* call, void* user) {
  memset((char*)call->out->data - (1 << 30), 0, 64);
  return attention(call, user);
}

int32_t writes_past_the_end(const flashcore_verify_call* call, void* user) {
  const flashcore_tensor* out = call->out;
  int64_t end = 1;
  for (int axis = 0; axis < 4; ++axis) end += (out->shape[axis] - 1) * out->strides[axis];
  ((float*)out->data)[end] = 1;
  return attention(call, user);
}

int32_t refuses_everything(const flashcore_verify_call* call, void* user) {
  (void)user;
  strncpy(call->message, "not today", call->message_bytes - 1);
  return FLASHCORE_UNSUPPORTED;
}

int32_t doubles_dq(const flashcore_verify_call* call, void* user) { return attention(call, user); }

int32_t doubles_dq_backward(const flashcore_verify_backward_call* call, void* user) {
  const int32_t code = attention_backward(call, user);
  const flashcore_tensor* t = call->dq;
  for (int64_t row = 0; code == 0 && row < t->shape[0] * t->shape[1] * t->shape[2]; ++row) {
    const int64_t i = row % t->shape[2], h = row / t->shape[2] % t->shape[1];
    float* at = (float*)t->data + row / t->shape[2] / t->shape[1] * t->strides[0] +
                h * t->strides[1] + i * t->strides[2];
    for (int64_t c = 0; c < t->shape[3]; ++c) at[c * t->strides[3]] *= 2;
  }
  return code;
}

int32_t backward_crashes(const flashcore_verify_call* call, void* user) {
  return attention(call, user);
}

int32_t backward_crashes_backward(const flashcore_verify_backward_call* call, void* user) {
  if (call->forward->k->shape[2] >= 65) raise(SIGSEGV);
  return attention_backward(call, user);
}
