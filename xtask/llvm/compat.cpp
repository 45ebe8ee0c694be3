// What CubeCL's C++ code, compiled by g++, misses in the LLVM that `cargo xtask setup` assembles.
//
// That libLLVM was built on libc++. A function with a type of the C++ library in its signature has
// another symbol there (std::__1::...) than the one g++ asks for (std::__cxx11::..., std::...). CubeCL
// calls two such functions; everything else goes through LLVM's C interface or through types of LLVM's
// own, which are the same for both. It was also built without the NVPTX target, which `cubecl-cuda`
// refers to but does not use when its feature `cuda-cpp` is on: kernels are then compiled by NVRTC.

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <llvm-c/Error.h>
#include <llvm/IR/Module.h>
#include <llvm/Linker/Linker.h>
#include <llvm/Support/Error.h>

namespace llvm {

// The C interface hands out the same text in memory that libLLVM owns.
std::string toString(Error error) {
  char *message = LLVMGetErrorMessage(wrap(std::move(error)));
  std::string copy(message);
  LLVMDisposeErrorMessage(message);
  return copy;
}

// CubeCL links device libraries into a kernel with this before it makes PTX. Without NVPTX there is no
// PTX to make, so it fails (true) and says what to do, instead of going on to a crash.
bool Linker::linkModules(
    Module &, std::unique_ptr<Module>, unsigned,
    std::function<void(Module &, const StringSet<> &)>) {
  std::fputs("this LLVM has no NVPTX target: build with CubeCL's feature `cuda-cpp`\n", stderr);
  return true;
}

} // namespace llvm

extern "C" {
void LLVMInitializeNVPTXTargetInfo(void) {}
void LLVMInitializeNVPTXTarget(void) {}
void LLVMInitializeNVPTXTargetMC(void) {}
void LLVMInitializeNVPTXAsmPrinter(void) {}
}
