"""What holds a kernel to its word: in the interpreter, on a GPU, and by the compiler alone."""
