// Linked and run once by `cargo xtask setup`: prints LLVM's version if the assembled prefix works.
//
// An error made inside libLLVM (libc++) must come out as text on this side (g++'s library), and the
// x86 code generator that CubeCL's CPU runtime needs must be there.

#include <cstdio>
#include <string>

#include <llvm-c/Core.h>
#include <llvm-c/Error.h>
#include <llvm-c/Target.h>
#include <llvm/Support/Error.h>

int main() {
  const std::string text = llvm::toString(llvm::unwrap(LLVMCreateStringError("across")));
  if (text != "across") {
    std::fprintf(stderr, "an error's text came out as `%s`\n", text.c_str());
    return 1;
  }
  if (LLVMInitializeNativeTarget() != 0 || LLVMInitializeNativeAsmPrinter() != 0) {
    std::fputs("this LLVM has no code generator for this processor\n", stderr);
    return 1;
  }
  unsigned major, minor, patch;
  LLVMGetVersion(&major, &minor, &patch);
  std::printf("%u.%u.%u\n", major, minor, patch);
  return 0;
}
