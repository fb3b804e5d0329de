"""In which order retrieved chunks stand in a prompt, where that is free (CRAFT). Nothing here imports torch."""
