"""Who runs what when: pipeline schedules as data, their laws, and how long they take."""
