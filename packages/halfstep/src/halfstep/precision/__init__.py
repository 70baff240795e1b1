"""From a request and a device to a Plan, and from a Plan to what runs."""
