/* A library whose destructor keeps its process from ending. */
#include <flashcore/verify_c.h>

int32_t attention(const flashcore_verify_call* call, void* user); /* examples/verify_me.c */

int32_t attends(const flashcore_verify_call* call, void* user) { return attention(call, user); }

__attribute__((destructor)) static void wait_for_ever(void) {
  for (volatile int n = 1; n > 0;) {
  }
}
