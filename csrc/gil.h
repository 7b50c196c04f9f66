// Lets other Python threads run while C++ works.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace tierstream {

// Gives the GIL back for its lifetime.
//
// Once the interpreter shuts down, CPython before 3.14 ends a daemon thread that asks for the GIL by
// pthread_exit, which unwinds its stack, and unwinding through C++ frames that are noexcept ends the whole
// process by std::terminate. Here such a thread sleeps until the process is gone, as in CPython 3.14.
class GilReleased {
public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    ~GilReleased() {
        try {
            PyEval_RestoreThread(state_);
        } catch (
            ...) {  // pthread_exit unwinds as an exception that must not be swallowed: never leave this block
            for (;;) pause();
        }
    }
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

private:
    PyThreadState* state_;
};

}  // namespace tierstream
