"""Files: image files, atomic writes, and the settings that a folder was made with."""
