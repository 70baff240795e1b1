"""The application on top of the library halfstep: the command `halfstep`, its workloads, and what it reports."""

__version__ = "0.1.0"
