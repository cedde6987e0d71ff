/* Functions that must not take the verifier's report down with them. */
#include <signal.h>
#include <string.h>

#include "../../examples/verify_me.c"

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

/* Past the guard bands, and past everything else too. */
int32_t writes_far_away(const flashcore_verify_call* call, void* user) {
  memset((char*)call->out->data - (1 << 30), 0, 64);
  return attention(call, user);
}

int32_t writes_past_the_end(const flashcore_verify_call* call, void* user) {
  const int64_t* n = call->out->shape;
  *at(call->out, n[0] - 1, n[1] - 1, n[2] - 1, n[3]) = 1;
  return attention(call, user);
}

int32_t refuses_everything(const flashcore_verify_call* call, void* user) {
  (void)user;
  strncpy(call->message, "not today", call->message_bytes - 1);
  return FLASHCORE_UNSUPPORTED;
}
