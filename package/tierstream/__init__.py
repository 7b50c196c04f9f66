"""tierstream trains language models whose state is larger than host memory, at full precision, on one GPU.

The subpackages, each a top-level folder of the repository, import only downward:

- `tierstream.tools`: the command line and its reports
- `tierstream.engine`: training, a layer at a time
- `tierstream.tiered`: the store of GPU buffers, DRAM and NVMe
- `tierstream.io`: moving bytes to and from files
- `tierstream._native`: the optimizer, sums, casts and checksums on the CPU
"""

from importlib.metadata import version

__version__ = version("tierstream")
