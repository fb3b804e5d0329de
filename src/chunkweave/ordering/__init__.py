"""The order of retrieved chunks in a prompt, if it is free (CRAFT). Nothing here imports torch."""
