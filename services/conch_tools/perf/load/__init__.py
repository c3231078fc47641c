"""Makes load: requests as ready bytes, clients of HTTP/1.1 and HTTP/2, schedules, processes."""
