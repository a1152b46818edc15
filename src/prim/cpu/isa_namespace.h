// Code that is compiled once per instruction set lives in a namespace named after it: the build
// defines FOVEA_ISA for each such file. Everything is forced inline, so that no function compiled
// for a newer instruction set can be merged by the linker with one that must run on an older
// machine.
#pragma once

#ifndef FOVEA_ISA
#error "files compiled per instruction set need FOVEA_ISA, the name of their namespace"
#endif

#define FOVEA_INLINE [[gnu::always_inline]] inline
#define FOVEA_INLINED __attribute__((always_inline))  // of a lambda
