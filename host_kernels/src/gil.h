// Letting other Python threads run during a call.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace herald {

// Releases the GIL while it lives. A thread that comes back while the interpreter is ending would
// be unwound through frames that must not be unwound, which ends the process with an abort: it
// sleeps until the process is gone instead, as threads do from Python 3.14 on. The thread that ends
// the interpreter, and frees what is left, goes on: nobody else wants the GIL by then.
class WithoutGil {
 public:
  WithoutGil() : state_(ending() ? nullptr : PyEval_SaveThread()) {}
  ~WithoutGil() {
    if (!state_) return;
    while (ending()) pause();
#if defined(__GLIBCXX__)
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      // The end came while this thread was waiting for its turn.
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  static bool ending() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
  }

  PyThreadState* state_;
};

}  // namespace herald
