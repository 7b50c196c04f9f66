"""The store: model state in pages, in DRAM and on NVMe. Knows files and numpy, nothing of torch.

- `layout`: units, planes, pages; no I/O
- `store`: leases on pages; what callers use, with `lease` and `stats`
- `cache`: the state machine behind it, with `frames`, `policy`, `reclaim` (eviction, write-back), `prefetch`
- `replay`: recorded page uses, served again by that state machine or at best
- `arena`: the DRAM, pinned for the GPU
- `zarrdir`: chunk files on one or more drives; `hierarchy` is the format, `bfloat16` its type for zarr,
  `readback` the check that drives give back what was written
- `snapshot`: checkpoints that are complete or not there; `manifest` and `pagereader` are their format
"""
