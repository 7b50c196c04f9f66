"""Moving bytes between memory and files: backends, durable writes, drives, memory limits. Knows nothing of
models or tensors.

- `errors`: the one tree of errors
- `seam`: every system call on a file, replaceable by tests
- `backend`: what a backend is, and `open_backend`; `posix` and `kvikio_backend` are the two there are;
  `throttle` makes either slower
- `durable`: files and directories that are complete or not there
- `drives`: checks and lock of the directories that hold the state; `spread`: which of them gets which page
- `memory`, `limits`: how much memory and how many files this process may take
- `probes`: processor, drives, PCIe links
"""
