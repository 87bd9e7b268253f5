"""The model: from a directory to a decoder that answers packed rows, and the checks that it does so rightly."""
