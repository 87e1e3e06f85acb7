"""How the documentation is built by `make docs`. Nothing is run or fetched; notebooks are shown as they are stored."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "cacheprobe"
copyright = "cacheprobe's authors, Apache-2.0"
version = release = version_of("cacheprobe")

extensions = ["myst_nb", "sphinx.ext.autodoc", "plain_docstrings"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
root_doc = "index"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]  # plotly's own data; the picture beside it is shown

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "cacheprobe"
html_static_path = ["_static"]
html_css_files = ["cacheprobe.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_dark_style = "github-dark"
