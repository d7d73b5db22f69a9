"""Sockets of other libraries: importing a module of this package registers Interlace there."""
