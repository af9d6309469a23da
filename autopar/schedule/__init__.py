"""Pipeline schedules as data, the laws they obey, and how long they take."""
