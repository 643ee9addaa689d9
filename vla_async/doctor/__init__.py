"""``vla-async doctor``: whether this machine can run a recipe, and what to do where it cannot.

``libraries`` and ``vulkan`` need the standard library only: ``scripts/system_libraries.py`` uses them before anything is
installed.
"""
