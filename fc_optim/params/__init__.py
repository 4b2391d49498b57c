"""Which tensors are trained: names, identities, how they are cut, what ranks say to each other."""
