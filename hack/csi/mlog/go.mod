module monis.app/mlog

go 1.26.0
