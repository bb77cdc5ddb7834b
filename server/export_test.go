package server

import (
	"github.com/gin-gonic/gin"
)

// Engine is the handler without a listener. Tests add routes to it and answer single requests with it.
func (s *Server) Engine() *gin.Engine { return s.engine }
