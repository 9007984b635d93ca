"""Files: decoding of images, atomic writes, and the settings that a folder was made with."""
