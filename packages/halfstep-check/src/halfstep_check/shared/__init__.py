"""What halfstep and this package both need, copied so that either works without the other."""
