"""What `examples/demo.py` is made of: the processes it starts, how it looks at them, and the judge."""
