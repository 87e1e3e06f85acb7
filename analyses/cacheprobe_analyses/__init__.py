"""Questions put to models that beat chance on their task: one a file, with run(config) -> Result.

The folders sort the files by subject. `python -m cacheprobe_analyses.NAME` runs a file in any of them;
import a file with its folder, as in cacheprobe_analyses.coin.coin_rows.
"""

from pathlib import Path

__path__ += [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if (folder / "__init__.py").exists()]
