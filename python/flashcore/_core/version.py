"""Version of the Python files. It equals the version in CMakeLists.txt."""

VERSION = "0.2.0"
